"""Minimum variance with a target return."""
import numpy as np
from scipy.optimize import minimize

returns = np.array([0.05, 0.08, 0.12, 0.07])
spread = np.array([0.05, 0.12, 0.25, 0.10])
covariance = np.outer(spread, spread) * (0.3 + 0.7 * np.eye(4))

constraints = [
    {"type": "eq", "fun": lambda w: w.sum() - 1},
    {"type": "ineq", "fun": lambda w: w @ returns - 0.08},
]
best = minimize(lambda w: w @ covariance @ w, np.full(4, 0.25), bounds=[(0, 1)] * 4, constraints=constraints)
print(best.x.round(3), "risk", round(float(np.sqrt(best.fun)), 4))
