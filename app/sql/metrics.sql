-- What /metrics tells of the cluster.

-- name: state_of_cluster
-- How many there are of what, by up to two labels; of what there is none, no row. See the gauges of app/metrics.py.
-- parameters: stale_ms bigint
-- returns: gauge, first, second (its labels), value
SELECT 'workers' AS gauge, flavor AS first, state AS second, count(*) AS value
FROM workers
GROUP BY flavor, state
UNION ALL
SELECT 'leases', worker_flavor, CASE WHEN accepted_at IS NULL THEN 'no' ELSE 'yes' END, count(*)
FROM leases
GROUP BY worker_flavor, CASE WHEN accepted_at IS NULL THEN 'no' ELSE 'yes' END
UNION ALL
SELECT 'sandboxes', workers.flavor, '', count(*)
FROM sandboxes
JOIN workers ON workers.worker_id = sandboxes.worker_id
GROUP BY workers.flavor
UNION ALL
SELECT
    'sessions',
    CASE
        WHEN sessions.expired_at IS NOT NULL THEN 'expired'
        WHEN leases.placement_id IS NOT NULL OR ending.session_id IS NOT NULL THEN 'busy'
        ELSE 'idle'
    END,
    '', count(*)
FROM sessions
LEFT JOIN leases ON leases.session_id = sessions.session_id
LEFT JOIN (SELECT DISTINCT worker_id, session_id FROM cancellations WHERE session_id IS NOT NULL) ending
    ON ending.session_id = sessions.session_id AND ending.worker_id = sessions.worker_id
GROUP BY 2
UNION ALL
SELECT 'calls_waiting', '', '', count(*)
FROM session_waits
WHERE seen_at > now() - CAST(:stale_ms AS bigint) * INTERVAL '1 millisecond'
UNION ALL
SELECT 'catalogue', active_catalogues.flavor, catalogues.generation, 1
FROM active_catalogues
JOIN catalogues ON catalogues.catalogue_id = active_catalogues.catalogue_id;
