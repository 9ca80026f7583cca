"""Four panels of one table."""
from io import BytesIO

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

rng = np.random.default_rng(5)
days = pd.date_range("2024-01-01", periods=120)
table = pd.DataFrame({"revenue": rng.gamma(3, 100, 120), "visits": rng.poisson(400, 120)}, index=days)
table["per_visit"] = table.revenue / table.visits

fig, axes = plt.subplots(2, 2, figsize=(9, 6))
table.revenue.plot(ax=axes[0, 0], title="revenue")
table.visits.plot(ax=axes[0, 1], title="visits")
table.per_visit.plot.hist(ax=axes[1, 0], bins=20, title="per visit")
axes[1, 1].scatter(table.visits, table.revenue, s=8)
fig.tight_layout()
fig.savefig(BytesIO(), format="png")
print(table.describe().round(2))
