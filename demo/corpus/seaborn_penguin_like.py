import io

import numpy as np
import pandas as pd
import seaborn as sns

rng = np.random.default_rng(2)
birds = pd.DataFrame({"species": np.repeat(["a", "b", "c"], 40), "bill": rng.normal(40, 3, 120)})
birds["mass"] = birds["bill"] * 100 + rng.normal(0, 150, 120)
axes = sns.scatterplot(birds, x="bill", y="mass", hue="species")
file = io.BytesIO()
axes.figure.savefig(file, format="png")
print(birds.groupby("species")["mass"].mean().round(0).to_dict(), file.tell() > 0)
