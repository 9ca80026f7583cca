-- SQL for people, second part: what a catalogue says by itself. They stand on the six views of views_tables.sql alone;
-- over a Parquet projection on those of parquet.sql (docs/sql.md says how), and answer the same.

-- Which packages cost most: each distribution with all its items, and how many checkpoints hold any of them.
CREATE VIEW package_costs AS
WITH held AS (
    SELECT flavor, distribution, count(DISTINCT ordinal) AS checkpoints
    FROM checkpoint_contents
    GROUP BY flavor, distribution
),
summed AS (
    SELECT flavor, distribution, count(*) AS items, sum(load_ns) AS load_ns, sum(size_bytes) AS size_bytes
    FROM active_items
    WHERE resource_type = 'package'
    GROUP BY flavor, distribution
)
SELECT
    s.flavor, s.distribution, coalesce(d.version, '') AS version, s.items,
    CAST(s.load_ns AS bigint) AS load_ns, CAST(s.load_ns AS double precision) / 1000000000 AS load_s,
    CAST(s.size_bytes AS bigint) AS size_bytes, CAST(s.size_bytes AS double precision) / 1000000 AS size_mb,
    coalesce(h.checkpoints, 0) AS checkpoints
FROM summed s
LEFT JOIN active_distributions d ON d.flavor = s.flavor AND d.distribution = s.distribution
LEFT JOIN held h ON h.flavor = s.flavor AND h.distribution = s.distribution;

-- What each item costs: by itself, and with its closure; how many checkpoints hold it.
CREATE VIEW item_costs AS
WITH held AS (
    SELECT flavor, item_id, count(*) AS checkpoints
    FROM checkpoint_contents
    GROUP BY flavor, item_id
)
SELECT
    i.flavor, i.item, i.resource_type, i.distribution, coalesce(d.version, '') AS version,
    i.load_ns, CAST(i.load_ns AS double precision) / 1000000000 AS load_s,
    i.size_bytes, CAST(i.size_bytes AS double precision) / 1000000 AS size_mb,
    c.items AS closure_items,
    c.load_ns AS closure_load_ns, CAST(c.load_ns AS double precision) / 1000000000 AS closure_load_s,
    c.size_bytes AS closure_size_bytes, CAST(c.size_bytes AS double precision) / 1000000 AS closure_size_mb,
    coalesce(h.checkpoints, 0) AS checkpoints
FROM active_items i
JOIN closure_costs c ON c.flavor = i.flavor AND c.item_id = i.item_id
LEFT JOIN active_distributions d ON d.flavor = i.flavor AND d.distribution = i.distribution
LEFT JOIN held h ON h.flavor = i.flavor AND h.item_id = i.item_id;

-- What each checkpoint holds and what that is worth: load is what loading all that it holds costs without it, size its
-- price; a call saves load - size at most, if it needs everything.
CREATE VIEW checkpoint_costs AS
WITH held AS (
    SELECT
        c.flavor, c.ordinal, count(*) AS items, sum(CASE WHEN c.canonical THEN 1 ELSE 0 END) AS canonical_items,
        count(DISTINCT c.distribution) AS distributions, sum(i.load_ns) AS load_ns
    FROM checkpoint_contents c
    JOIN active_items i ON i.flavor = c.flavor AND i.item_id = c.item_id
    GROUP BY c.flavor, c.ordinal
)
SELECT
    c.flavor, c.ordinal, c.checkpoint_id, coalesce(h.items, 0) AS items,
    CAST(coalesce(h.canonical_items, 0) AS bigint) AS canonical_items, coalesce(h.distributions, 0) AS distributions,
    c.size_bytes, CAST(c.size_bytes AS double precision) / 1000000 AS size_mb,
    c.size_ns, CAST(c.size_ns AS double precision) / 1000000000 AS size_s,
    CAST(coalesce(h.load_ns, 0) AS bigint) AS load_ns,
    CAST(coalesce(h.load_ns, 0) AS double precision) / 1000000000 AS load_s,
    CAST(coalesce(h.load_ns, 0) - c.size_ns AS bigint) AS saves_at_most_ns,
    CAST(coalesce(h.load_ns, 0) - c.size_ns AS double precision) / 1000000000 AS saves_at_most_s
FROM active_checkpoints c
LEFT JOIN held h ON h.flavor = c.flavor AND h.ordinal = c.ordinal;

-- Items that no checkpoint holds.
CREATE VIEW unheld_items AS
SELECT i.flavor, i.item, i.resource_type, i.distribution, i.load_ns, CAST(i.load_ns AS double precision) / 1000000000 AS load_s
FROM active_items i
WHERE NOT EXISTS (SELECT 1 FROM checkpoint_contents c WHERE c.flavor = i.flavor AND c.item_id = i.item_id);
