from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, func, insert, select

metadata = MetaData()
stock = Table("stock", metadata, Column("id", Integer, primary_key=True), Column("shelf", String), Column("units", Integer))
engine = create_engine("sqlite://")
metadata.create_all(engine)
with engine.begin() as connection:
    connection.execute(insert(stock), [{"shelf": f"s{n % 3}", "units": n} for n in range(30)])
    query = select(stock.c.shelf, func.sum(stock.c.units)).group_by(stock.c.shelf).order_by(stock.c.shelf)
    print(connection.execute(query).all())
