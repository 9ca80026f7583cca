"""From a table to a model to a picture of it."""
from io import BytesIO

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import train_test_split

rng = np.random.default_rng(10)
houses = pd.DataFrame({"area": rng.uniform(40, 200, 300), "age": rng.uniform(0, 80, 300)})
houses["price"] = 3000 * houses["area"] - 800 * houses["age"] + rng.normal(0, 20000, 300)
train, test = train_test_split(houses, random_state=0)
model = LinearRegression().fit(train[["area", "age"]], train["price"])
predicted = model.predict(test[["area", "age"]])

figure, axes = plt.subplots()
axes.scatter(test["price"], predicted, s=10)
axes.set(xlabel="paid", ylabel="predicted")
figure.savefig(BytesIO(), format="png")
print("R²", round(model.score(test[["area", "age"]], test["price"]), 3))
