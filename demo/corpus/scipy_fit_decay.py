import numpy as np
from scipy.optimize import curve_fit


def decay(t, amplitude, rate, offset):
    return amplitude * np.exp(-rate * t) + offset


t = np.linspace(0, 5, 100)
noisy = decay(t, 2.5, 1.3, 0.5) + np.random.default_rng(4).normal(0, 0.05, t.size)
parameters, covariance = curve_fit(decay, t, noisy, p0=(1, 1, 0))
print("fit", parameters.round(2), "±", np.sqrt(np.diag(covariance)).round(3))
