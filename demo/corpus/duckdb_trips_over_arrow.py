import duckdb
import pyarrow as pa

trips = pa.table({"zone": [n % 7 for n in range(20_000)], "fare": [5 + n % 30 for n in range(20_000)]})
connection = duckdb.connect()
connection.register("trips", trips)
rows = connection.execute(
    "SELECT zone, count(*) AS trips, round(avg(fare), 2) AS fare FROM trips GROUP BY zone ORDER BY zone"
).fetchall()
for row in rows:
    print(row)
