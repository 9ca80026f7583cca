import io

import pandas as pd

customers = pd.read_csv(io.StringIO("id,name,city\n1,Ada,Paris\n2,Ben,Rome\n3,Cyd,Oslo\n"))
orders = pd.read_csv(
    io.StringIO("order,customer,total,day\n10,1,99.5,2024-03-01\n11,2,15.0,2024-03-02\n12,1,42.0,2024-03-09\n"),
    parse_dates=["day"],
)
merged = customers.merge(orders, left_on="id", right_on="customer", how="left")
summary = merged.groupby("name").agg(orders=("order", "count"), spent=("total", "sum"), last=("day", "max"))
print(summary.sort_values("spent", ascending=False))
