-- Times of a clock that was ahead, or that has been set back since: what lies in the future is moved to now. Otherwise a
-- worker that is gone is missed, and a lease ended, that much later.

-- name: times_ahead
-- Whether a time of what has happened lies in the future; calls and sessions are too many to be looked at each time.
-- parameters: ahead_ms bigint
-- returns: one row a table that has such a time; none: all is well
SELECT DISTINCT noted.place
FROM (
    SELECT 'workers' AS place, heard_at AS noted_at FROM workers
    UNION ALL
    SELECT 'leases', coalesce(accepted_at, placed_at) FROM leases
    UNION ALL
    SELECT 'cancellations', created_at FROM cancellations
    UNION ALL
    SELECT 'session_waits', seen_at FROM session_waits
) noted
WHERE noted.noted_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond';

-- name: set_back_workers
-- Workers heard in the future were heard now.
-- parameters: ahead_ms bigint
UPDATE workers SET heard_at = now() WHERE heard_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond';

-- name: set_back_leases
-- Leases of the future begin now, and have as long as they had.
-- parameters: ahead_ms bigint
UPDATE leases SET
    deadline_at = deadline_at - (coalesce(accepted_at, placed_at) - now()),
    placed_at = CASE WHEN placed_at > now() THEN now() ELSE placed_at END,
    accepted_at = CASE WHEN accepted_at > now() THEN now() ELSE accepted_at END
WHERE coalesce(accepted_at, placed_at) > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond';

-- name: set_back_calls
-- As set_back_workers, for what has happened to calls.
-- parameters: ahead_ms bigint
UPDATE calls SET
    created_at = CASE WHEN created_at > now() THEN now() ELSE created_at END,
    accepted_at = CASE WHEN accepted_at > now() THEN now() ELSE accepted_at END,
    finished_at = CASE WHEN finished_at > now() THEN now() ELSE finished_at END,
    read_at = CASE WHEN read_at > now() THEN now() ELSE read_at END
WHERE created_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond'
   OR accepted_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond'
   OR finished_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond'
   OR read_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond';

-- name: set_back_cancellations
-- As set_back_workers.
-- parameters: ahead_ms bigint
UPDATE cancellations SET created_at = now()
WHERE created_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond';

-- name: set_back_sessions
-- As set_back_workers. settle_ms: how long at most a report may be on its way.
-- parameters: ahead_ms bigint, settle_ms bigint
UPDATE sessions SET
    created_at = CASE WHEN created_at > now() THEN now() ELSE created_at END,
    used_at = CASE WHEN used_at > now() THEN now() ELSE used_at END,
    expired_at = CASE WHEN expired_at > now() THEN now() ELSE expired_at END,
    settles_at = CASE
        WHEN settles_at > now() + CAST(:settle_ms AS bigint) * INTERVAL '1 millisecond'
            THEN now() + CAST(:settle_ms AS bigint) * INTERVAL '1 millisecond'
        ELSE settles_at
    END
WHERE created_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond'
   OR used_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond'
   OR expired_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond'
   OR settles_at > now()
        + (CAST(:ahead_ms AS bigint) + CAST(:settle_ms AS bigint)) * INTERVAL '1 millisecond';

-- name: set_back_session_waits
-- As set_back_workers; who waits has gone unless its router asks again.
-- parameters: ahead_ms bigint
UPDATE session_waits SET seen_at = now() WHERE seen_at > now() + CAST(:ahead_ms AS bigint) * INTERVAL '1 millisecond';
