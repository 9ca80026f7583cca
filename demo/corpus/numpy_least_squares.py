import numpy as np

rng = np.random.default_rng(7)
x = np.linspace(0, 10, 200)
y = 3.0 + 0.5 * x - 0.08 * x**2 + rng.normal(0, 0.1, x.size)

design = np.vander(x, 3, increasing=True)
coefficients, residuals, rank, _ = np.linalg.lstsq(design, y, rcond=None)
print("coefficients", np.round(coefficients, 2), "rank", rank)
