"""Mixed columns: scale the numbers, encode the words, fit."""
import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

rng = np.random.default_rng(6)
table = pd.DataFrame({"months": rng.integers(1, 60, 500), "plan": rng.choice(["basic", "plus"], 500)})
churned = (table["months"] < 12) & (table["plan"] == "basic")
columns = make_column_transformer((StandardScaler(), ["months"]), (OneHotEncoder(), ["plan"]))
model = make_pipeline(columns, LogisticRegression()).fit(table, churned)
print("trained accuracy", round(model.score(table, churned), 3))
