import duckdb

with duckdb.connect() as connection:
    connection.execute("CREATE TABLE orders AS SELECT i AS id, i % 13 AS product, (i * 7) % 50 AS amount FROM range(5000) t(i)")
    best = connection.execute(
        "SELECT product, sum(amount) AS total FROM orders GROUP BY product ORDER BY total DESC, product LIMIT 3"
    ).fetchall()
    print(best)
