import numpy as np
import pandas as pd

rng = np.random.default_rng(3)
visits = pd.DataFrame({"user": rng.integers(0, 80, 1000), "day": rng.integers(0, 180, 1000)})
visits["month"] = visits["day"] // 30
visits["cohort"] = visits.groupby("user")["month"].transform("min")
visits["age"] = visits["month"] - visits["cohort"]
counts = visits.groupby(["cohort", "age"])["user"].nunique().unstack(fill_value=0)
print((counts.div(counts[0], axis=0) * 100).round(1))
