-- SQL for people, third part: the calls that the router has recorded, and what they would cost with the active
-- catalogue. Payloads, results and output of calls are in no view.

-- Calls as they were placed and went. Costs are those of the catalogue at that time; checkpoint_id null: cold start, or,
-- where the reason is session, the sandbox that a session had.
CREATE VIEW recorded_calls AS
SELECT
    call_id, worker_flavor AS flavor, function, state, outcome, created_at, finished_at, worker_id, generation,
    checkpoint_id, pinned_checkpoint_id, cold AS asked_cold, started, reason, memory_bytes, attempts,
    cost_ns, CAST(cost_ns AS double precision) / 1000000000 AS cost_s,
    cold_cost_ns, CAST(cold_cost_ns AS double precision) / 1000000000 AS cold_cost_s,
    predicted_ready_ns, CAST(predicted_ready_ns AS double precision) / 1000000000 AS predicted_ready_s,
    measured_ready_ns, CAST(measured_ready_ns AS double precision) / 1000000000 AS measured_ready_s
FROM calls;

-- Modules that calls asked for, and the item that each stood for when it was placed; null: it matched nothing.
CREATE VIEW recorded_modules AS
SELECT c.call_id, c.worker_flavor AS flavor, c.function, c.created_at, m.module, m.item
FROM calls c
JOIN call_modules m ON m.call_id = c.call_id;

-- Calls that left the choice to the router, with the set of active items that they ask for, sorted. Calls that
-- were pinned or asked for a cold start, later calls of sessions, and those of which nothing matches, are not among them.
CREATE VIEW call_import_sets AS
WITH RECURSIVE prefixes AS (
    SELECT DISTINCT module, module AS key
    FROM call_modules
    UNION
    -- A module stands for itself, else for its longest prefix that is an item; one with a colon only for itself.
    SELECT module, regexp_replace(key, '[.][^.]*$', '')
    FROM prefixes
    WHERE position('.' IN key) > 0 AND position(':' IN module) = 0
),
matches AS (
    SELECT DISTINCT ON (i.flavor, p.module) i.flavor, p.module, i.item
    FROM prefixes p
    JOIN active_items i ON i.item = p.key
    ORDER BY i.flavor, p.module, length(p.key) DESC
),
asked AS (
    SELECT DISTINCT c.call_id, c.worker_flavor AS flavor, c.function, c.created_at, m.item
    FROM calls c
    JOIN call_modules o ON o.call_id = c.call_id
    JOIN matches m ON m.flavor = c.worker_flavor AND m.module = o.module
    WHERE NOT c.cold AND c.pinned_checkpoint_id IS NULL AND NOT c.continues
)
SELECT call_id, flavor, function, created_at, array_agg(item ORDER BY item COLLATE "C") AS import_set
FROM asked
GROUP BY call_id, flavor, function, created_at;

-- The distinct import sets of those calls, with how many calls have each.
CREATE VIEW import_sets AS
SELECT flavor, import_set, count(*) AS calls
FROM call_import_sets
GROUP BY flavor, import_set;

-- The items that each import set needs, closures included.
CREATE VIEW import_set_contents AS
WITH asked AS (
    SELECT s.flavor, s.import_set, unnest(s.import_set) AS item
    FROM import_sets s
),
needed AS MATERIALIZED (
    SELECT q.flavor, q.import_set, a.catalogue_id, bit_or(k.bits) AS bits
    FROM asked q
    JOIN active_catalogues a ON a.flavor = q.flavor
    JOIN items i ON i.catalogue_id = a.catalogue_id AND i.key = q.item
    JOIN closures k ON k.catalogue_id = i.catalogue_id AND k.closure_id = i.closure_id
    GROUP BY q.flavor, q.import_set, a.catalogue_id
)
SELECT n.flavor, n.import_set, i.item_id, i.key AS item, i.distribution, i.load_ns
FROM needed n
JOIN items i
    ON i.catalogue_id = n.catalogue_id
    AND CASE WHEN i.catalogue_id = n.catalogue_id THEN get_bit(n.bits, i.atom_id) END = 1;

-- What each import set would cost on every checkpoint of the active catalogue, and cold (ordinal -1), best first by
-- place; as if every checkpoint were held by the worker and within the call's memory. The cost model of scoring.sql.
CREATE VIEW import_set_costs AS
WITH asked AS (
    SELECT s.flavor, s.import_set, s.calls, unnest(s.import_set) AS item
    FROM import_sets s
),
needed AS MATERIALIZED (
    SELECT q.flavor, q.import_set, q.calls, a.catalogue_id, bit_or(k.bits) AS bits
    FROM asked q
    JOIN active_catalogues a ON a.flavor = q.flavor
    JOIN items i ON i.catalogue_id = a.catalogue_id AND i.key = q.item
    JOIN closures k ON k.catalogue_id = i.catalogue_id AND k.closure_id = i.closure_id
    GROUP BY q.flavor, q.import_set, q.calls, a.catalogue_id
),
missing AS MATERIALIZED (
    SELECT
        n.flavor, n.import_set, n.calls, p.ordinal, CAST(sum(p.weight * bit_count(n.bits & p.bits)) AS bigint) AS load_ns
    FROM needed n
    JOIN planes p ON p.catalogue_id = n.catalogue_id
    GROUP BY n.flavor, n.import_set, n.calls, p.ordinal
),
options AS (
    SELECT
        m.flavor, m.import_set, m.calls, m.ordinal, c.checkpoint_id, coalesce(c.size_ns, 0) AS size_ns,
        m.load_ns AS missing_ns
    FROM missing m
    LEFT JOIN active_checkpoints c ON c.flavor = m.flavor AND c.ordinal = m.ordinal
)
SELECT
    flavor, import_set, calls,
    row_number() OVER (PARTITION BY flavor, import_set ORDER BY size_ns + missing_ns, ordinal DESC) AS place,
    ordinal, checkpoint_id, size_ns, missing_ns, size_ns + missing_ns AS cost_ns,
    CAST(size_ns + missing_ns AS double precision) / 1000000000 AS cost_s
FROM options;

-- What the recorded calls would have cost with all checkpoints of the active catalogue, without any, and without each
-- one: calls and import_sets are those for which it is the best. What one saves is little where another is nearly as good.
CREATE VIEW checkpoint_savings AS
WITH ranked AS MATERIALIZED (
    SELECT
        flavor, place, ordinal, calls, cost_ns,
        lead(cost_ns) OVER (PARTITION BY flavor, import_set ORDER BY place) AS next_ns
    FROM import_set_costs
),
best AS (
    SELECT
        flavor, ordinal, sum(calls) AS calls, count(*) AS import_sets, sum(calls * (next_ns - cost_ns)) AS saved_ns
    FROM ranked
    WHERE place = 1
    GROUP BY flavor, ordinal
),
total AS (
    SELECT
        flavor, sum(CASE WHEN place = 1 THEN calls * cost_ns ELSE 0 END) AS with_all_ns,
        sum(CASE WHEN ordinal = -1 THEN calls * cost_ns ELSE 0 END) AS with_none_ns
    FROM ranked
    GROUP BY flavor
)
SELECT
    c.flavor, c.ordinal, c.checkpoint_id, CAST(coalesce(b.calls, 0) AS bigint) AS calls,
    coalesce(b.import_sets, 0) AS import_sets,
    CAST(coalesce(b.saved_ns, 0) AS bigint) AS saved_ns,
    CAST(coalesce(b.saved_ns, 0) AS double precision) / 1000000000 AS saved_s,
    CAST(coalesce(t.with_all_ns, 0) AS bigint) AS with_all_ns,
    CAST(coalesce(t.with_all_ns, 0) AS double precision) / 1000000000 AS with_all_s,
    CAST(coalesce(t.with_all_ns + coalesce(b.saved_ns, 0), 0) AS bigint) AS without_ns,
    CAST(coalesce(t.with_all_ns + coalesce(b.saved_ns, 0), 0) AS double precision) / 1000000000 AS without_s,
    CAST(coalesce(t.with_none_ns, 0) AS bigint) AS with_none_ns,
    CAST(coalesce(t.with_none_ns, 0) AS double precision) / 1000000000 AS with_none_s
FROM active_checkpoints c
LEFT JOIN best b ON b.flavor = c.flavor AND b.ordinal = c.ordinal
LEFT JOIN total t ON t.flavor = c.flavor;

-- For whom each checkpoint was chosen, and what it saved them against a cold start, by the costs at that time.
CREATE VIEW checkpoint_users AS
SELECT
    worker_flavor AS flavor, generation, checkpoint_id, function, count(*) AS calls,
    CAST(sum(cold_cost_ns - cost_ns) AS bigint) AS saved_ns,
    CAST(sum(cold_cost_ns - cost_ns) AS double precision) / 1000000000 AS saved_s,
    max(created_at) AS last_call_at
FROM calls
WHERE checkpoint_id IS NOT NULL
GROUP BY worker_flavor, generation, checkpoint_id, function;

-- Items in no checkpoint that calls need: how often they were asked for by name, how often needed at all, and the
-- seconds that all these calls spend on loading them.
CREATE VIEW unheld_requests AS
WITH needed AS (
    SELECT c.flavor, c.item, CAST(sum(s.calls) AS bigint) AS calls
    FROM import_set_contents c
    JOIN import_sets s ON s.flavor = c.flavor AND s.import_set = c.import_set
    GROUP BY c.flavor, c.item
),
asked AS (
    SELECT u.flavor, u.item, CAST(sum(u.calls) AS bigint) AS calls
    FROM (SELECT flavor, calls, unnest(import_set) AS item FROM import_sets) u
    GROUP BY u.flavor, u.item
)
SELECT
    i.flavor, i.item, i.distribution, coalesce(a.calls, 0) AS asked_calls, n.calls AS needed_calls,
    i.load_ns, i.load_s, n.calls * i.load_ns AS spent_ns,
    CAST(n.calls * i.load_ns AS double precision) / 1000000000 AS spent_s
FROM unheld_items i
JOIN needed n ON n.flavor = i.flavor AND n.item = i.item
LEFT JOIN asked a ON a.flavor = i.flavor AND a.item = i.item;

-- Predicted against measured time to ready of calls that have both, means for each checkpoint and way of starting;
-- checkpoint_id null: a cold start was chosen. started says what happened: a restore that failed went on cold.
CREATE VIEW start_drift AS
SELECT
    worker_flavor AS flavor, generation, checkpoint_id, started, count(*) AS calls,
    CAST(sum(predicted_ready_ns) AS double precision) / count(*) / 1000000000 AS predicted_s,
    CAST(sum(measured_ready_ns) AS double precision) / count(*) / 1000000000 AS measured_s,
    CAST(sum(measured_ready_ns - predicted_ready_ns) AS double precision) / count(*) / 1000000000 AS drift_s,
    CAST(min(measured_ready_ns) AS double precision) / 1000000000 AS fastest_s,
    CAST(max(measured_ready_ns) AS double precision) / 1000000000 AS slowest_s
FROM calls
WHERE predicted_ready_ns IS NOT NULL AND measured_ready_ns IS NOT NULL
GROUP BY worker_flavor, generation, checkpoint_id, started;
