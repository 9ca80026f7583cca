import numpy as np


def estimate(samples: int, seed: int) -> float:
    generator = np.random.default_rng(seed)
    points = generator.random((samples, 2))
    return 4 * np.mean(np.sum(points**2, axis=1) < 1)


for exponent in range(3, 7):
    print(10**exponent, estimate(10**exponent, seed=exponent))
