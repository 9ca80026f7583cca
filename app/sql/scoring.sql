-- The cost model (readie/cost.py is its oracle):
--     cost of a checkpoint = size_ns + load_ns of the needed items that it lacks
--     cost of a cold start =           load_ns of all needed items
-- All in integer nanoseconds. Closures are bit strings over atoms; an atom knows its class, a class its checkpoints
-- (docs/decisions/0001-closures.md).

-- name: score_calls
-- Prices all options of each request and ranks them; returns each request's best, or with `every` all of them.
-- parameters: requests integer[], catalogue_ids integer[], generations text[], worker_ids text[], budgets_bytes bigint[]
-- parameters: prefix_requests integer[], prefix_modules integer[], prefix_depths integer[], prefixes text[]
-- parameters: kept_requests integer[], kept_distributions text[], every boolean
-- One request a position of the first five arrays. worker_ids null: whether a checkpoint is held does not matter.
-- budgets_bytes null: no limit, else what is left for the checkpoint. Each module of a request comes with those of its
-- prefixes that may be items, itself included; depth is the number of its dots. kept_distributions are installed for the call.
-- returns: place 1 is the best; ordinal -1 is the cold start; kept_distribution, held and fits say why it is no option;
-- the module numbers that matched and their items, in parallel, on place 1 only.
WITH requests AS MATERIALIZED (
    SELECT
        unnest(CAST(:requests AS integer[])) AS request,
        unnest(CAST(:catalogue_ids AS integer[])) AS catalogue_id,
        unnest(CAST(:generations AS text[])) AS generation,
        unnest(CAST(:worker_ids AS text[])) AS worker_id,
        unnest(CAST(:budgets_bytes AS bigint[])) AS budget_bytes
),
prefixes AS (
    SELECT
        unnest(CAST(:prefix_requests AS integer[])) AS request,
        unnest(CAST(:prefix_modules AS integer[])) AS module,
        unnest(CAST(:prefix_depths AS integer[])) AS depth,
        unnest(CAST(:prefixes AS text[])) AS key
),
kept AS (
    SELECT
        unnest(CAST(:kept_requests AS integer[])) AS request,
        unnest(CAST(:kept_distributions AS text[])) AS distribution
),
-- A module stands for itself, else for its longest prefix that is an item.
matches AS MATERIALIZED (
    SELECT DISTINCT ON (p.request, p.module) p.request, p.module, r.catalogue_id, i.key, i.closure_id
    FROM prefixes p
    JOIN requests r ON r.request = p.request
    JOIN items i ON i.catalogue_id = r.catalogue_id AND i.key = p.key
    ORDER BY p.request, p.module, p.depth DESC
),
-- Every needed atom once, as one bit string a request.
needed AS MATERIALIZED (
    SELECT m.request, m.catalogue_id, bit_or(c.bits) AS bits
    FROM matches m
    JOIN closures c ON c.catalogue_id = m.catalogue_id AND c.closure_id = m.closure_id
    GROUP BY m.request, m.catalogue_id
),
needed_classes AS MATERIALIZED (
    SELECT n.request, n.catalogue_id, a.class_id, CAST(sum(a.load_ns) AS bigint) AS load_ns
    FROM needed n
    JOIN atoms a
        -- Inside CASE, because get_bit must not see another catalogue's atoms: they may lie beyond the string's end.
        ON a.catalogue_id = n.catalogue_id
        AND CASE WHEN a.catalogue_id = n.catalogue_id THEN get_bit(n.bits, a.atom_id) END = 1
    GROUP BY n.request, n.catalogue_id, a.class_id
),
-- From requests, so that one of which nothing is known has a cost too: 0.
cold AS MATERIALIZED (
    SELECT r.request, r.catalogue_id, CAST(coalesce(sum(n.load_ns), 0) AS bigint) AS cost_ns
    FROM requests r
    LEFT JOIN needed_classes n ON n.request = r.request
    GROUP BY r.request, r.catalogue_id
),
saved AS MATERIALIZED (
    SELECT u.request, u.ordinal, CAST(sum(u.load_ns) AS bigint) AS load_ns
    FROM (
        SELECT n.request, unnest(k.ordinals) AS ordinal, n.load_ns
        FROM needed_classes n
        JOIN classes k ON k.catalogue_id = n.catalogue_id AND k.class_id = n.class_id
    ) u
    GROUP BY u.request, u.ordinal
),
-- In steps: whatever a planner believes about the tables, it begins with the few that are kept.
kept_items AS MATERIALIZED (
    SELECT r.request, i.catalogue_id, i.atom_id, i.distribution
    FROM kept k
    JOIN requests r ON r.request = k.request
    JOIN items i ON i.catalogue_id = r.catalogue_id AND i.distribution = k.distribution
),
-- Checkpoints that hold an item of a distribution that is installed anew: the loaded module would win over it.
spoiled AS MATERIALIZED (
    SELECT u.request, u.ordinal, min(u.distribution COLLATE "C") AS distribution
    FROM (
        SELECT i.request, unnest(c.ordinals) AS ordinal, i.distribution
        FROM kept_items i
        JOIN atoms a ON a.catalogue_id = i.catalogue_id AND a.atom_id = i.atom_id
        JOIN classes c ON c.catalogue_id = a.catalogue_id AND c.class_id = a.class_id
    ) u
    GROUP BY u.request, u.ordinal
),
options AS (
    SELECT
        r.request, c.ordinal, c.checkpoint_id, c.size_bytes, c.size_ns,
        cold.cost_ns - coalesce(saved.load_ns, 0) AS missing_ns,
        r.worker_id IS NULL OR h.checkpoint_id IS NOT NULL AS held,
        r.budget_bytes IS NULL OR c.size_bytes <= r.budget_bytes AS fits,
        spoiled.distribution AS kept_distribution
    FROM requests r
    JOIN cold ON cold.request = r.request
    JOIN checkpoints c ON c.catalogue_id = r.catalogue_id
    LEFT JOIN saved ON saved.request = r.request AND saved.ordinal = c.ordinal
    LEFT JOIN spoiled ON spoiled.request = r.request AND spoiled.ordinal = c.ordinal
    LEFT JOIN worker_checkpoints h
        ON h.worker_id = r.worker_id AND h.generation = r.generation AND h.checkpoint_id = c.checkpoint_id
    UNION ALL
    SELECT request, -1, CAST(NULL AS text), 0, 0, cost_ns, true, true, CAST(NULL AS text)
    FROM cold
),
ranked AS (
    SELECT
        o.*,
        row_number() OVER (
            PARTITION BY o.request
            ORDER BY
                (o.held AND o.fits AND o.kept_distribution IS NULL) DESC, -- what is no option comes after what is one
                o.size_ns + o.missing_ns, -- the lowest cost
                o.ordinal DESC -- on a tie the later one; the cold start is before all
        ) AS place
    FROM options o
),
matched AS (
    SELECT
        request,
        array_agg(module ORDER BY module) AS modules,
        array_agg(key ORDER BY module) AS keys
    FROM matches
    GROUP BY request
)
SELECT
    r.request, CAST(r.place AS integer) AS place, r.ordinal, r.checkpoint_id, r.size_bytes, r.size_ns, r.missing_ns,
    r.size_ns + r.missing_ns AS cost_ns, cold.cost_ns AS cold_cost_ns,
    r.held, r.fits, r.kept_distribution, m.modules, m.keys
FROM ranked r
JOIN cold ON cold.request = r.request
LEFT JOIN matched m ON m.request = r.request AND r.place = 1
WHERE r.place = 1 OR CAST(:every AS boolean)
ORDER BY r.request, r.place;

-- name: list_missing_items
-- Which needed items some options lack, the most expensive first.
-- parameters: catalogue_id integer, keys text[], ordinals integer[]
-- keys are the items that the modules stand for; ordinal -1 is the cold start, which lacks all.
WITH needed AS MATERIALIZED (
    SELECT bit_or(c.bits) AS bits
    FROM items i
    JOIN closures c ON c.catalogue_id = i.catalogue_id AND c.closure_id = i.closure_id
    WHERE i.catalogue_id = CAST(:catalogue_id AS integer) AND i.key = ANY(CAST(:keys AS text[]))
),
asked AS (
    SELECT unnest(CAST(:ordinals AS integer[])) AS ordinal
)
SELECT o.ordinal, i.key, i.load_ns
FROM items i
JOIN atoms a ON a.catalogue_id = i.catalogue_id AND a.atom_id = i.atom_id
JOIN classes k ON k.catalogue_id = a.catalogue_id AND k.class_id = a.class_id
CROSS JOIN needed n
CROSS JOIN asked o
WHERE i.catalogue_id = CAST(:catalogue_id AS integer)
    AND get_bit(n.bits, i.atom_id) = 1
    AND NOT o.ordinal = ANY(k.ordinals)
ORDER BY o.ordinal, i.load_ns DESC, i.key COLLATE "C";

-- name: find_markers
-- The marker environment of a worker of this flavor, the first by name: what its root filesystem's Python says.
-- parameters: flavor text
-- returns: at most one value, JSON
SELECT markers
FROM workers
WHERE flavor = CAST(:flavor AS text)
ORDER BY worker_id COLLATE "C"
LIMIT 1;
