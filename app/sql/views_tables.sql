-- SQL for people, first part: the active catalogue of each flavor, readable, over the router's tables. The views of
-- views.sql stand on these six alone, so that parquet.sql can put the files of a Parquet projection in their place.
--
-- In all views: one row a flavor and thing, of the active catalogue. `_ns` are nanoseconds, exact; `_s` the same in
-- seconds, for reading; sizes are bytes, `_mb` 10^6 of them. Item, package and checkpoint names are text.

-- Distributions of the root filesystem of each flavor; version '' where it names none.
CREATE VIEW active_distributions AS
SELECT a.flavor, d.name AS distribution, d.version
FROM active_catalogues a
JOIN distributions d ON d.catalogue_id = a.catalogue_id;

-- Measured items: what loading one costs by itself, without what it needs.
CREATE VIEW active_items AS
SELECT
    a.flavor, i.item_id, i.key AS item, i.resource_type, i.distribution, i.load_ns,
    CAST(floor(i.size_mb * 1000000 + 0.5) AS bigint) AS size_bytes
FROM active_catalogues a
JOIN items i ON i.catalogue_id = a.catalogue_id;

-- Checkpoints in the document's order; size_ns is the price of the size, alpha x size_mb.
CREATE VIEW active_checkpoints AS
SELECT a.flavor, c.ordinal, c.checkpoint_id, c.size_bytes, c.size_ns
FROM active_catalogues a
JOIN checkpoints c ON c.catalogue_id = a.catalogue_id;

-- What each checkpoint holds, an item a row; canonical: its executor was told to import it, the rest came with that.
CREATE VIEW checkpoint_contents AS
SELECT p.flavor, p.ordinal, p.checkpoint_id, i.item_id, i.key AS item, i.distribution, n.item_id IS NOT NULL AS canonical
FROM active_catalogues a
JOIN contents k ON k.catalogue_id = a.catalogue_id
JOIN active_checkpoints p ON p.flavor = a.flavor AND p.ordinal = k.ordinal
JOIN items i
    -- Inside CASE, because get_bit must not see another catalogue's atoms: they may lie beyond the string's end.
    ON i.catalogue_id = k.catalogue_id
    AND CASE WHEN i.catalogue_id = k.catalogue_id THEN get_bit(k.bits, i.atom_id) END = 1
LEFT JOIN canonical_items n ON n.catalogue_id = i.catalogue_id AND n.ordinal = k.ordinal AND n.item_id = i.item_id;

-- What each item needs, itself included, one needed item a row. Large: ask for few items.
CREATE VIEW closure_contents AS
SELECT a.flavor, i.item_id, i.key AS item, n.item_id AS needed_id, n.key AS needed, n.load_ns
FROM active_catalogues a
JOIN items i ON i.catalogue_id = a.catalogue_id
JOIN closures s ON s.catalogue_id = i.catalogue_id AND s.closure_id = i.closure_id
JOIN items n
    ON n.catalogue_id = s.catalogue_id
    AND CASE WHEN n.catalogue_id = s.catalogue_id THEN get_bit(s.bits, n.atom_id) END = 1;

-- What importing each item costs with all that it needs, in a fresh executor.
CREATE VIEW closure_costs AS
WITH measured AS MATERIALIZED (
    SELECT
        a.flavor, i.catalogue_id, i.atom_id, count(*) AS items, sum(i.load_ns) AS load_ns,
        sum(CAST(floor(i.size_mb * 1000000 + 0.5) AS bigint)) AS size_bytes
    FROM active_catalogues a
    JOIN items i ON i.catalogue_id = a.catalogue_id
    GROUP BY a.flavor, i.catalogue_id, i.atom_id
),
summed AS MATERIALIZED (
    SELECT
        s.catalogue_id, s.closure_id, sum(m.items) AS items, sum(m.load_ns) AS load_ns, sum(m.size_bytes) AS size_bytes
    FROM closures s
    JOIN measured m
        ON m.catalogue_id = s.catalogue_id
        AND CASE WHEN m.catalogue_id = s.catalogue_id THEN get_bit(s.bits, m.atom_id) END = 1
    GROUP BY s.catalogue_id, s.closure_id
)
SELECT
    a.flavor, i.item_id, i.key AS item, CAST(s.items AS bigint) AS items, CAST(s.load_ns AS bigint) AS load_ns,
    CAST(s.size_bytes AS bigint) AS size_bytes
FROM active_catalogues a
JOIN items i ON i.catalogue_id = a.catalogue_id
JOIN summed s ON s.catalogue_id = i.catalogue_id AND s.closure_id = i.closure_id;
