-- The cost model (readie/cost.py is its oracle):
--     cost of a checkpoint = size_ns + load_ns of the needed items that it lacks
--     cost of a cold start =           load_ns of all needed items
-- planes hold both terms: size_ns is the price of an atom more, which every call needs (closure -1).
-- All in integer nanoseconds. Closures, contents and planes are bit strings over atoms (docs/decisions/0001-closures.md).

-- name: match_items
-- Which of these names are items, and which closure each has.
-- parameters: catalogue_ids integer[], keys text[]
-- One name a position.
WITH asked AS (
    SELECT unnest(CAST(:catalogue_ids AS integer[])) AS catalogue_id, unnest(CAST(:keys AS text[])) AS key
)
SELECT i.catalogue_id, i.key, i.closure_id
FROM asked
JOIN items i ON i.catalogue_id = asked.catalogue_id AND i.key = asked.key;

-- name: price_options
-- Prices all options of each request, the cold start (ordinal -1) among them, and ranks them: the lowest cost first, on a
-- tie the later one.
-- parameters: requests integer[], catalogue_ids integer[], closure_ids integer[]
-- One needed closure a position; closure -1 is what every request needs.
-- returns: one row a request: the ordinals of its options, the best first, and what they cost, in parallel
WITH asked AS (
    SELECT
        unnest(CAST(:requests AS integer[])) AS request,
        unnest(CAST(:catalogue_ids AS integer[])) AS catalogue_id,
        unnest(CAST(:closure_ids AS integer[])) AS closure_id
),
-- Every needed atom once, as one bit string a request.
needed AS (
    SELECT a.request, a.catalogue_id, bit_or(c.bits) AS bits
    FROM asked a
    JOIN closures c ON c.catalogue_id = a.catalogue_id AND c.closure_id = a.closure_id
    GROUP BY a.request, a.catalogue_id
),
costs AS (
    SELECT n.request, p.ordinal, CAST(sum(p.weight * bit_count(n.bits & p.bits)) AS bigint) AS cost_ns
    FROM needed n
    JOIN planes p ON p.catalogue_id = n.catalogue_id
    GROUP BY n.request, p.ordinal
)
SELECT
    request,
    array_agg(ordinal ORDER BY cost_ns, ordinal DESC) AS ordinals,
    array_agg(cost_ns ORDER BY cost_ns, ordinal DESC) AS costs_ns
FROM costs
GROUP BY request;

-- name: list_spoiled
-- Checkpoints that hold an item of a distribution that is installed anew: the loaded module would win over it.
-- parameters: requests integer[], catalogue_ids integer[], distributions text[]
-- One distribution a position.
-- returns: request, ordinal, the first of its distributions by name
WITH asked AS (
    SELECT
        unnest(CAST(:requests AS integer[])) AS request,
        unnest(CAST(:catalogue_ids AS integer[])) AS catalogue_id,
        unnest(CAST(:distributions AS text[])) AS distribution
),
-- In steps: whatever a planner believes about the tables, it begins with the few that are asked for.
kept AS MATERIALIZED (
    SELECT DISTINCT a.request, a.catalogue_id, a.distribution, i.atom_id
    FROM asked a
    JOIN items i ON i.catalogue_id = a.catalogue_id AND i.distribution = a.distribution
)
SELECT k.request, c.ordinal, min(k.distribution COLLATE "C") AS distribution
FROM kept k
JOIN contents c
    -- Inside CASE, because get_bit must not see another catalogue's atoms: they may lie beyond the string's end.
    ON c.catalogue_id = k.catalogue_id
    AND CASE WHEN c.catalogue_id = k.catalogue_id THEN get_bit(c.bits, k.atom_id) END = 1
GROUP BY k.request, c.ordinal;

-- name: list_missing_items
-- Which needed items some options of each request lack, the most expensive first.
-- parameters: requests integer[], catalogue_ids integer[], closure_ids integer[], itemised integer[], ordinals integer[]
-- One needed closure a position of the first three; one option (a request's ordinal) a position of the other two. The
-- cold start, -1, lacks all.
-- returns: request, ordinal, key, load_ns
WITH asked AS (
    SELECT
        unnest(CAST(:requests AS integer[])) AS request,
        unnest(CAST(:catalogue_ids AS integer[])) AS catalogue_id,
        unnest(CAST(:closure_ids AS integer[])) AS closure_id
),
needed AS MATERIALIZED (
    SELECT a.request, a.catalogue_id, bit_or(c.bits) AS bits
    FROM asked a
    JOIN closures c ON c.catalogue_id = a.catalogue_id AND c.closure_id = a.closure_id
    GROUP BY a.request, a.catalogue_id
),
options AS (
    SELECT unnest(CAST(:itemised AS integer[])) AS request, unnest(CAST(:ordinals AS integer[])) AS ordinal
),
missing AS MATERIALIZED (
    SELECT
        n.request,
        n.catalogue_id,
        o.ordinal,
        CASE WHEN c.bits IS NULL THEN n.bits ELSE n.bits & ~c.bits END AS bits
    FROM options o
    JOIN needed n ON n.request = o.request
    LEFT JOIN contents c ON c.catalogue_id = n.catalogue_id AND c.ordinal = o.ordinal
)
SELECT m.request, m.ordinal, i.key, i.load_ns
FROM missing m
JOIN items i
    -- Inside CASE, because get_bit must not see another catalogue's atoms: they may lie beyond the string's end.
    ON i.catalogue_id = m.catalogue_id
    AND CASE WHEN i.catalogue_id = m.catalogue_id THEN get_bit(m.bits, i.atom_id) END = 1
ORDER BY m.request, m.ordinal, i.load_ns DESC, i.key COLLATE "C";

-- name: find_markers
-- The marker environment of a worker of this flavor, the first by name: what its root filesystem's Python says.
-- parameters: flavor text
-- returns: at most one value, JSON
SELECT markers
FROM workers
WHERE flavor = CAST(:flavor AS text)
ORDER BY worker_id COLLATE "C"
LIMIT 1;
