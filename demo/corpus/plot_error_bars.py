import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

x = np.arange(1, 9)
y = np.sqrt(x)
fig, ax = plt.subplots()
ax.errorbar(x, y, yerr=0.1 * y, fmt="o", capsize=3, label="measured")
ax.plot(x, y, "--", label="model")
ax.legend()
with tempfile.TemporaryDirectory() as folder:
    fig.savefig(Path(folder) / "errors.svg")
    print((Path(folder) / "errors.svg").stat().st_size > 1000)
