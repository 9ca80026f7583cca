import pandas as pd

sales = pd.DataFrame(
    {
        "region": ["north", "south", "east", "west"] * 25,
        "product": ["tea", "coffee"] * 50,
        "units": range(100),
        "price": [2.5, 3.0, 2.75, 3.25] * 25,
    }
)
sales["revenue"] = sales.units * sales.price
table = sales.pivot_table(index="region", columns="product", values="revenue", aggfunc="sum", fill_value=0)
print(table)
print("best region:", table.sum(axis=1).idxmax())
