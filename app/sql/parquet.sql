-- For the duckdb shell, started in the folder of a Parquet projection (catalogues/cpu.parquet): the views of
-- views_tables.sql over its files. After this file, read views.sql. docs/sql.md shows it.

CREATE VIEW active_distributions AS
SELECT c.flavor, d.name AS distribution, d.version
FROM read_parquet('catalogue.parquet') c, read_parquet('distributions.parquet') d;

CREATE VIEW active_items AS
SELECT
    c.flavor, i.item_id, i.key AS item, i.resource_type, i.distribution, i.load_ns,
    CAST(floor(i.size_mb * 1000000 + 0.5) AS bigint) AS size_bytes
FROM read_parquet('catalogue.parquet') c, read_parquet('items.parquet') i;

CREATE VIEW active_checkpoints AS
SELECT c.flavor, p.ordinal, p.checkpoint_id, p.size_bytes, p.size_ns
FROM read_parquet('catalogue.parquet') c, read_parquet('checkpoints.parquet') p;

CREATE VIEW checkpoint_contents AS
SELECT p.flavor, p.ordinal, p.checkpoint_id, i.item_id, i.item, i.distribution, h.canonical
FROM read_parquet('checkpoint_items.parquet') h
JOIN active_checkpoints p ON p.ordinal = h.ordinal
JOIN active_items i ON i.item_id = h.item_id;

-- The files have the dependencies as the document lists them; closures are what they reach. Importing a package imports
-- the packages around it.
CREATE VIEW closure_contents AS
WITH RECURSIVE around AS (
    SELECT item_id, item AS key
    FROM active_items
    WHERE resource_type = 'package'
    UNION
    SELECT item_id, regexp_replace(key, '[.][^.]*$', '')
    FROM around
    WHERE contains(key, '.')
),
edges AS (
    SELECT item_id, dependency_id AS needed_id
    FROM read_parquet('dependencies.parquet')
    UNION
    SELECT a.item_id, i.item_id
    FROM around a
    JOIN active_items i ON i.item = a.key
),
closure AS (
    SELECT item_id, item_id AS needed_id
    FROM active_items
    UNION
    SELECT c.item_id, e.needed_id
    FROM closure c
    JOIN edges e ON e.item_id = c.needed_id
)
SELECT i.flavor, i.item_id, i.item, n.item_id AS needed_id, n.item AS needed, n.load_ns
FROM closure c
JOIN active_items i ON i.item_id = c.item_id
JOIN active_items n ON n.item_id = c.needed_id;

CREATE VIEW closure_costs AS
SELECT
    c.flavor, c.item_id, c.item, count(*) AS items, CAST(sum(c.load_ns) AS bigint) AS load_ns,
    CAST(sum(n.size_bytes) AS bigint) AS size_bytes
FROM closure_contents c
JOIN active_items n ON n.item_id = c.needed_id
GROUP BY c.flavor, c.item_id, c.item;
