import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

table = pa.table({"sensor": ["a", "b", "c", "d"] * 2500, "value": [float(n % 97) for n in range(10_000)]})
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "readings.parquet"
    pq.write_table(table, path, compression="zstd")
    values = pq.read_table(path, columns=["value"])["value"]
    print(path.stat().st_size, "bytes, mean", pc.mean(values).as_py())
