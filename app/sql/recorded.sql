-- What calls were recorded to import: the corpus of a live system.

-- name: recorded_imports
-- The module sets of calls that were placed after `since` and not after `until`, on workers of a flavor, most frequent
-- first; null: whenever, until now, any flavor. Calls that named no module have no set, and later calls of sessions count
-- nowhere: nothing was started for them.
-- parameters: since timestamp with time zone, until timestamp with time zone, flavor text, at_most integer, skip integer
-- returns: modules, sorted; calls; until
WITH span AS (
    SELECT coalesce(CAST(:until AS timestamp with time zone), now()) AS until
),
asked AS (
    SELECT DISTINCT calls.call_id, call_modules.module
    FROM calls
    JOIN span ON calls.created_at <= span.until
    JOIN call_modules ON call_modules.call_id = calls.call_id
    WHERE (CAST(:since AS timestamp with time zone) IS NULL
           OR calls.created_at > CAST(:since AS timestamp with time zone))
      AND (CAST(:flavor AS text) IS NULL OR calls.worker_flavor = CAST(:flavor AS text))
      AND NOT calls.continues
),
sets AS (
    SELECT array_agg(module ORDER BY module COLLATE "C") AS modules
    FROM asked
    GROUP BY call_id
)
SELECT sets.modules, count(*) AS calls, span.until
FROM sets
CROSS JOIN span
GROUP BY sets.modules, span.until
ORDER BY count(*) DESC, array_to_string(sets.modules, ' ') COLLATE "C"
LIMIT CAST(:at_most AS integer) OFFSET CAST(:skip AS integer);
