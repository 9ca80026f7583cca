-- What the dashboard's pages show, besides what other routes read too.

-- name: live_calls
-- Calls that are placed and have not ended, the latest first, and how many there are in all.
-- parameters: at_most integer
SELECT
    c.call_id, c.function, c.worker_id, c.worker_flavor, c.checkpoint_id, c.continues, l.placed_at,
    l.accepted_at IS NOT NULL AS accepted, count(*) OVER () AS calls
FROM leases l
JOIN calls c ON c.call_id = l.call_id
ORDER BY l.placed_at DESC, c.call_id COLLATE "C"
LIMIT CAST(:at_most AS integer);

-- name: search_calls
-- Calls, the latest first. `wanted` is a part of the function's name, or the whole id of the call, its worker, session or
-- checkpoint; `module` one that it asked for, or the item that this stood for; `started` restored or cold. Null: any.
-- parameters: wanted text, module text, state text, flavor text, started text, at_most integer, skip integer
SELECT
    call_id, state, function, created_at, finished_at, worker_id, worker_flavor, checkpoint_id, continues, started,
    predicted_ready_ns, measured_ready_ns
FROM calls
WHERE (CAST(:state AS text) IS NULL OR state = CAST(:state AS text))
  AND (CAST(:flavor AS text) IS NULL OR worker_flavor = CAST(:flavor AS text))
  AND (CAST(:started AS text) IS NULL OR started = CAST(:started AS text))
  AND (
      CAST(:wanted AS text) IS NULL
      OR position(lower(CAST(:wanted AS text)) IN lower(function)) > 0
      OR CAST(:wanted AS text) IN (call_id, worker_id, session_id, checkpoint_id)
  )
  AND (
      CAST(:module AS text) IS NULL
      OR call_id IN (
          SELECT call_id FROM call_modules
          WHERE module = CAST(:module AS text) OR item = CAST(:module AS text)
      )
  )
ORDER BY created_at DESC, call_id COLLATE "C"
LIMIT CAST(:at_most AS integer) OFFSET CAST(:skip AS integer);

-- name: call_with_choice
-- A call with all that is known of it: where it went and why, what its catalogue said of its checkpoint, how it ended.
-- The catalogue may have been dropped since, and the result.
-- parameters: call_id text
-- returns: at most one row
SELECT
    c.call_id, c.state, c.function, c.python, c.gpu, c.memory_bytes, c.max_memory_bytes, c.session_id, c.attempts,
    c.worker_id, c.worker_flavor, c.generation, c.checkpoint_id, c.pinned_checkpoint_id, c.cold, c.continues,
    c.cost_ns, c.cold_cost_ns, c.predicted_ready_ns, c.measured_ready_ns, c.reason, c.started, c.outcome,
    c.created_at, c.accepted_at, c.finished_at, g.sha256, k.size_mb, k.size_ns, r.result
FROM calls c
LEFT JOIN catalogues g ON g.catalogue_id = c.catalogue_id
LEFT JOIN checkpoints k ON k.catalogue_id = c.catalogue_id AND k.checkpoint_id = c.checkpoint_id
LEFT JOIN call_results r ON r.call_id = c.call_id
WHERE c.call_id = CAST(:call_id AS text);

-- name: modules_with_items
-- The modules of a call, in its order, and the item that each stood for; null: none.
-- parameters: call_id text
SELECT module, item
FROM call_modules
WHERE call_id = CAST(:call_id AS text)
ORDER BY position;

-- name: packages_with_reasons
-- What became of a call's requirements, in its order.
-- parameters: call_id text
SELECT requirement, skipped, installed, reason
FROM call_packages
WHERE call_id = CAST(:call_id AS text)
ORDER BY position;

-- name: search_items
-- Items of a catalogue whose key contains a text, whatever the case: the one that is called so first, then those that
-- begin with it, then short ones before long ones. Of each, what it costs by itself and with all that it needs.
-- parameters: catalogue_id integer, wanted text, at_most integer
-- returns: matches is how many there are in all
WITH found AS MATERIALIZED (
    SELECT item_id, key, resource_type, distribution, load_ns, size_mb, closure_id, atom_id, count(*) OVER () AS matches
    FROM items
    WHERE catalogue_id = CAST(:catalogue_id AS integer) AND position(lower(CAST(:wanted AS text)) IN lower(key)) > 0
    ORDER BY
        CASE WHEN lower(key) = lower(CAST(:wanted AS text)) THEN 0 ELSE 1 END,
        CASE WHEN starts_with(lower(key), lower(CAST(:wanted AS text))) THEN 0 ELSE 1 END,
        length(key), key COLLATE "C"
    LIMIT CAST(:at_most AS integer)
),
-- What a cold start costs for the closure: all that it needs.
needed AS (
    SELECT f.item_id, CAST(sum(p.weight * bit_count(s.bits & p.bits)) AS bigint) AS closure_ns
    FROM found f
    JOIN closures s ON s.catalogue_id = CAST(:catalogue_id AS integer) AND s.closure_id = f.closure_id
    JOIN planes p ON p.catalogue_id = s.catalogue_id AND p.ordinal = -1
    GROUP BY f.item_id
),
held AS (
    SELECT f.item_id, count(*) AS checkpoints
    FROM found f
    JOIN contents c
        -- Inside CASE, because get_bit must not see another catalogue's atoms: they may lie beyond the string's end.
        ON c.catalogue_id = CAST(:catalogue_id AS integer)
        AND CASE WHEN c.catalogue_id = CAST(:catalogue_id AS integer) THEN get_bit(c.bits, f.atom_id) END = 1
    GROUP BY f.item_id
)
SELECT
    f.key, f.resource_type, f.distribution, f.load_ns, f.size_mb, f.matches,
    coalesce(n.closure_ns, 0) AS closure_ns, coalesce(h.checkpoints, 0) AS checkpoints
FROM found f
LEFT JOIN needed n ON n.item_id = f.item_id
LEFT JOIN held h ON h.item_id = f.item_id
ORDER BY
    CASE WHEN lower(f.key) = lower(CAST(:wanted AS text)) THEN 0 ELSE 1 END,
    CASE WHEN starts_with(lower(f.key), lower(CAST(:wanted AS text))) THEN 0 ELSE 1 END,
    length(f.key), f.key COLLATE "C";

-- name: costliest_packages
-- The distributions of a catalogue that cost most, with all their items, and the sums over all of them.
-- parameters: catalogue_id integer, at_most integer
WITH summed AS (
    SELECT distribution, count(*) AS items, CAST(sum(load_ns) AS bigint) AS load_ns, sum(size_mb) AS size_mb
    FROM items
    WHERE catalogue_id = CAST(:catalogue_id AS integer) AND resource_type = 'package'
    GROUP BY distribution
)
SELECT
    s.distribution, coalesce(d.version, '') AS version, s.items, s.load_ns, s.size_mb,
    CAST(sum(s.load_ns) OVER () AS bigint) AS all_load_ns, count(*) OVER () AS packages
FROM summed s
LEFT JOIN distributions d ON d.catalogue_id = CAST(:catalogue_id AS integer) AND d.name = s.distribution
ORDER BY s.load_ns DESC, s.distribution COLLATE "C"
LIMIT CAST(:at_most AS integer);

-- name: packages_in_checkpoints
-- How much of some distributions each checkpoint of a catalogue holds; no row: nothing.
-- parameters: catalogue_id integer, distributions text[]
-- returns: distribution, ordinal, the number of its items that are held, and their load_ns
WITH atoms AS MATERIALIZED (
    SELECT distribution, atom_id, count(*) AS items, sum(load_ns) AS load_ns
    FROM items
    WHERE catalogue_id = CAST(:catalogue_id AS integer) AND distribution = ANY(CAST(:distributions AS text[]))
    GROUP BY distribution, atom_id
)
SELECT a.distribution, c.ordinal, CAST(sum(a.items) AS bigint) AS items, CAST(sum(a.load_ns) AS bigint) AS load_ns
FROM atoms a
JOIN contents c
    -- Inside CASE, because get_bit must not see another catalogue's atoms: they may lie beyond the string's end.
    ON c.catalogue_id = CAST(:catalogue_id AS integer)
    AND CASE WHEN c.catalogue_id = CAST(:catalogue_id AS integer) THEN get_bit(c.bits, a.atom_id) END = 1
GROUP BY a.distribution, c.ordinal;

-- name: price_everything
-- What each checkpoint of a catalogue, and the cold start (ordinal -1), would cost a call that needs every item.
-- parameters: catalogue_id integer
WITH options AS (
    SELECT -1 AS ordinal
    UNION ALL
    SELECT ordinal FROM checkpoints WHERE catalogue_id = CAST(:catalogue_id AS integer)
)
SELECT o.ordinal, CAST(coalesce(sum(p.weight * bit_count(p.bits)), 0) AS bigint) AS cost_ns
FROM options o
LEFT JOIN planes p ON p.catalogue_id = CAST(:catalogue_id AS integer) AND p.ordinal = o.ordinal
GROUP BY o.ordinal
ORDER BY o.ordinal;

-- name: restores_by_size
-- The recorded calls that were restored from the checkpoints of a generation: how long each took to be ready, less what
-- the catalogue says of the imports that the checkpoint lacked. What is left is the restore: the fixed part, and the size's.
-- parameters: generation text
-- returns: a checkpoint a row: its size, the number of calls, their median
SELECT
    c.checkpoint_id, k.size_mb, count(*) AS calls,
    percentile_cont(0.5) WITHIN GROUP (
        ORDER BY CAST(c.measured_ready_ns - (c.cost_ns - k.size_ns) AS double precision)
    ) AS restore_ns
FROM calls c
JOIN checkpoints k ON k.catalogue_id = c.catalogue_id AND k.checkpoint_id = c.checkpoint_id
WHERE c.generation = CAST(:generation AS text)
  AND c.started = 'restored' AND c.measured_ready_ns IS NOT NULL AND c.cost_ns IS NOT NULL
GROUP BY c.checkpoint_id, k.size_mb
ORDER BY k.size_mb, c.checkpoint_id COLLATE "C";

-- name: fixed_parts
-- The fixed part of a restore and of a cold start, as the workers that hold a generation report it: the smallest.
-- parameters: generation text
-- returns: one row; null: no worker holds it
SELECT min(restore_fixed_ns) AS restore_fixed_ns, min(cold_fixed_ns) AS cold_fixed_ns
FROM worker_generations
WHERE generation = CAST(:generation AS text);

-- name: view_columns
-- The columns of some views, in their order.
-- parameters: names text[]
SELECT table_name, column_name
FROM information_schema.columns
WHERE table_schema = current_schema() AND table_name = ANY(CAST(:names AS text[]))
ORDER BY table_name COLLATE "C", ordinal_position;
