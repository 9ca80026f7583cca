"""Find the two tones in a noisy signal."""
import numpy as np

rate = 1000
t = np.arange(0, 2, 1 / rate)
signal = np.sin(2 * np.pi * 50 * t) + 0.5 * np.sin(2 * np.pi * 120 * t)
signal += np.random.default_rng(1).normal(0, 0.4, t.size)

power = np.abs(np.fft.rfft(signal)) ** 2
frequencies = np.fft.rfftfreq(t.size, 1 / rate)
strongest = frequencies[np.argsort(power)[-2:]]
print("tones at", sorted(strongest.round().tolist()), "Hz")
