"""Typical cleaning: missing values, odd spellings, outliers."""
import numpy as np
import pandas as pd

raw = pd.DataFrame(
    {
        "age": [34, None, 29, 410, 51, 38],
        "answer": [" yes", "No", "YES ", None, "no", "maybe"],
        "score": [3.5, 4.0, np.nan, 2.0, 5.0, 4.5],
    }
)
clean = raw.assign(
    age=raw["age"].where(raw["age"].between(0, 120)),
    answer=raw["answer"].str.strip().str.lower().fillna("unknown").astype("category"),
    score=raw["score"].fillna(raw["score"].median()),
)
print(clean)
print(clean.groupby("answer", observed=True)["score"].mean())
