"""The demo's ten calls: ordinary functions over well-known packages, each with the answer that it must give.

Every function returns plain numbers or text, so that the caller needs none of the packages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isclose
from typing import Any

Value = float | int | str


def eigenvalues() -> Value:
    """The largest eigenvalue of the second-difference matrix of order 50."""
    import numpy as np

    matrix = 2 * np.eye(50) - np.eye(50, k=1) - np.eye(50, k=-1)
    return float(np.linalg.eigvalsh(matrix)[-1])


def group_by() -> Value:
    """The mean of the best group of a table."""
    import pandas as pd

    table = pd.DataFrame({"city": ["Oslo", "Rome", "Oslo", "Rome", "Cairo"] * 200, "value": range(1000)})
    return float(table.groupby("city")["value"].mean().max())


def optimisation() -> Value:
    """The minimum of Rosenbrock's function."""
    from scipy.optimize import minimize, rosen

    return float(minimize(rosen, [1.3, 0.7, 0.8, 1.9, 1.2], method="BFGS").fun)


def logistic_regression() -> Value:
    """The number of irises that a logistic regression names rightly, of 150, rounded to tens."""
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    features, labels = load_iris(return_X_y=True)
    right = (LogisticRegression(max_iter=500).fit(features, labels).predict(features) == labels).sum()
    return round(int(right), -1)


def picture() -> Value:
    """The signature and the width of a plot, as a PNG."""
    import io

    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(4, 3), dpi=100)
    axes.plot([0, 1, 2, 3], [0, 1, 4, 9])
    file = io.BytesIO()
    figure.savefig(file, format="png")
    plt.close(figure)
    return f"{file.getvalue()[1:4].decode()} {int.from_bytes(file.getvalue()[16:20])}"


def image() -> Value:
    """The grey value in the middle of a blurred picture."""
    from PIL import Image, ImageDraw, ImageFilter

    canvas = Image.new("L", (200, 200), 0)
    ImageDraw.Draw(canvas).rectangle((50, 50, 150, 150), fill=255)
    value = canvas.filter(ImageFilter.GaussianBlur(3)).getpixel((100, 100))
    assert isinstance(value, int)
    return value


def shortest_path() -> Value:
    """The length of the shortest way through a grid of 20 by 20."""
    import networkx as nx

    return int(nx.shortest_path_length(nx.grid_2d_graph(20, 20), (0, 0), (19, 19)))


def integral() -> Value:
    """The integral of a Gaussian over the whole line, in closed form."""
    import sympy

    x = sympy.Symbol("x")
    return str(sympy.integrate(sympy.exp(-(x**2)), (x, -sympy.oo, sympy.oo)))


def report() -> Value:
    """A fit over a table, drawn: its slope and the kind of picture."""
    import io

    import matplotlib as mpl
    import pandas as pd
    from sklearn.linear_model import LinearRegression

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    table = pd.DataFrame({"x": range(100)}).assign(y=lambda frame: 3 * frame["x"] + 1)
    slope = LinearRegression().fit(table[["x"]], table["y"]).coef_[0]
    figure, axes = plt.subplots()
    axes.scatter(table["x"], table["y"])
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    plt.close(figure)
    return f"{slope:.3f} {'svg' if b'<svg' in file.getvalue() else 'nothing'}"


def query() -> Value:
    """The sum that duckdb finds in a pyarrow table."""
    import duckdb
    import pyarrow as pa

    numbers = pa.table({"n": list(range(1001))})
    row = duckdb.connect().register("numbers", numbers).execute("SELECT sum(n) FROM numbers").fetchone()
    assert row is not None
    return int(row[0])


@dataclass(frozen=True)
class Call:
    """One call of the demo: what it does, in the table's words, and what it must answer."""

    title: str
    function: Callable[[], Value]
    answer: Value

    def is_right(self, value: Any) -> bool:
        """Whether `value` is the answer; numbers may differ in the seventh digit."""
        if isinstance(self.answer, float):
            return isinstance(value, float) and isclose(value, self.answer, rel_tol=1e-6, abs_tol=1e-6)
        return bool(value == self.answer)


CALLS = [
    Call("numpy eigenvalues", eigenvalues, 3.9962066574740884),
    Call("pandas group-by", group_by, 501.5),
    Call("scipy optimisation", optimisation, 0.0),
    Call("scikit-learn logistic regression", logistic_regression, 150),
    Call("matplotlib picture", picture, "PNG 400"),
    Call("Pillow blur", image, 255),
    Call("networkx shortest path", shortest_path, 38),
    Call("sympy integral", integral, "sqrt(pi)"),
    Call("pandas + scikit-learn + matplotlib", report, "3.000 svg"),
    Call("duckdb over pyarrow", query, 500500),
]
