"""The slowest modes of a vibrating string."""
import numpy as np

n = 200
spacing = 1 / (n + 1)
stiffness = (2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)) / spacing**2
values, modes = np.linalg.eigh(stiffness)
frequencies = np.sqrt(values[:5])
print("first frequencies:", np.round(frequencies, 3))
print("nodes of the third mode:", int(np.sum(np.diff(np.sign(modes[:, 2])) != 0)))
