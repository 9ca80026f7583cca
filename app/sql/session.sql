-- Sessions: whose sandbox they have, who waits for a turn in one, when they are over. A session is busy while a lease
-- names it; the tables allow one. What its sandbox is, is what the call got for which it was started.

-- name: expire_sessions
-- Sessions whose sandbox is gone are over: their worker does not report it any more, was evicted or leaves, or another
-- agent speaks for it. Not while a call has them, because it may be what starts the sandbox.
-- parameters: session_ids text[], ttl_ms bigint
-- ttl_ms null: however long the worker was not heard from.
-- returns: session_id of those that are over now
UPDATE sessions SET expired_at = now()
WHERE expired_at IS NULL AND session_id IN (
    SELECT sessions.session_id
    FROM (SELECT unnest(CAST(:session_ids AS text[])) AS session_id) asked
    JOIN sessions ON sessions.session_id = asked.session_id
    LEFT JOIN leases ON leases.session_id = sessions.session_id
    LEFT JOIN sandboxes
        ON sandboxes.worker_id = sessions.worker_id AND sandboxes.session_id = sessions.session_id
    LEFT JOIN workers
        ON workers.worker_id = sessions.worker_id
       AND workers.incarnation = sessions.incarnation
       AND workers.state <> 'removed'
       AND (CAST(:ttl_ms AS bigint) IS NULL
            OR workers.heard_at > now() - CAST(:ttl_ms AS bigint) * INTERVAL '1 millisecond')
    WHERE sessions.expired_at IS NULL
      AND sessions.incarnation IS NOT NULL
      AND leases.placement_id IS NULL
      AND (sandboxes.sandbox_id IS NULL OR workers.worker_id IS NULL)
)
RETURNING session_id;

-- name: unreported_sessions
-- Sessions that `expire_sessions` may expire: their worker does not report their sandboxes.
-- parameters: worker_id text
-- Null: of any worker.
-- returns: session_id
SELECT sessions.session_id
FROM sessions
LEFT JOIN sandboxes
    ON sandboxes.worker_id = sessions.worker_id AND sandboxes.session_id = sessions.session_id
LEFT JOIN workers
    ON workers.worker_id = sessions.worker_id
   AND workers.incarnation = sessions.incarnation
   AND workers.state <> 'removed'
WHERE (CAST(:worker_id AS text) IS NULL OR sessions.worker_id = CAST(:worker_id AS text))
  AND sessions.expired_at IS NULL
  AND sessions.incarnation IS NOT NULL
  AND (sandboxes.sandbox_id IS NULL OR workers.worker_id IS NULL);

-- name: sessions_asked_for
-- What calls have to know of their sessions.
-- parameters: session_ids text[], stale_ms bigint
-- returns: one row a session: state (null: it is not there), next_call_id (who has waited longest for a turn); its
-- worker; and of its sandbox: call_id, gpu, memory_bytes, max_memory_bytes, gpu_memory_bytes and max_gpu_memory_bytes
-- (null: the whole), checkpoint_id, started
WITH asked AS (
    SELECT DISTINCT unnest(CAST(:session_ids AS text[])) AS session_id
),
waiting AS (
    SELECT DISTINCT ON (session_id) session_id, call_id
    FROM session_waits
    WHERE seen_at > now() - CAST(:stale_ms AS bigint) * INTERVAL '1 millisecond'
    ORDER BY session_id, ticket
),
ending AS (
    SELECT DISTINCT worker_id, session_id FROM cancellations WHERE session_id IS NOT NULL
)
SELECT
    asked.session_id,
    CASE
        WHEN sessions.session_id IS NULL THEN NULL
        WHEN sessions.expired_at IS NOT NULL THEN 'expired'
        WHEN leases.placement_id IS NOT NULL OR ending.session_id IS NOT NULL THEN 'busy'
        -- no agent has started a sandbox for it, and none is asked to
        WHEN sessions.incarnation IS NULL THEN NULL
        ELSE 'idle'
    END AS state,
    waiting.call_id AS next_call_id,
    sessions.worker_id, workers.flavor, workers.markers, workers.gpu_total_bytes,
    sessions.call_id, calls.gpu, calls.memory_bytes, calls.max_memory_bytes, calls.gpu_memory_bytes,
    calls.max_gpu_memory_bytes, calls.checkpoint_id, calls.started
FROM asked
LEFT JOIN sessions ON sessions.session_id = asked.session_id
LEFT JOIN leases ON leases.session_id = asked.session_id
LEFT JOIN ending ON ending.session_id = sessions.session_id AND ending.worker_id = sessions.worker_id
LEFT JOIN waiting ON waiting.session_id = asked.session_id
LEFT JOIN calls ON calls.call_id = sessions.call_id
LEFT JOIN workers ON workers.worker_id = sessions.worker_id;

-- name: bind_sessions
-- Sessions begin on the workers where their first calls were placed; placed again, those begin them anew.
-- parameters: session_id text[], call_id text[], worker_id text[]
INSERT INTO sessions (session_id, worker_id, call_id, created_at, used_at)
SELECT
    unnest(CAST(:session_id AS text[])), unnest(CAST(:worker_id AS text[])), unnest(CAST(:call_id AS text[])),
    now(), now()
ON CONFLICT (session_id) DO UPDATE SET
    worker_id = excluded.worker_id, call_id = excluded.call_id, incarnation = NULL, settles_at = NULL,
    used_at = excluded.used_at;

-- name: start_sessions
-- The agents that have just accepted the first calls of sessions have their sandboxes from now on.
-- parameters: placement_ids text[]
UPDATE sessions SET incarnation = leases.incarnation
FROM leases
WHERE leases.session_id = sessions.session_id
  AND leases.call_id = sessions.call_id
  AND leases.placement_id IN (SELECT unnest(CAST(:placement_ids AS text[])));

-- name: leave_sessions
-- Calls of sessions have ended; all lists are one value a call. ran: it had a sandbox. settle_ms: how old a report may
-- be that does not know of the sandbox; null: the sandbox may have ended with the call. gone: its agent says that it has.
-- parameters: session_id text[], call_id text[], ran boolean[], settle_ms bigint[], gone boolean[]
UPDATE sessions SET
    used_at = now(),
    incarnation = CASE
        WHEN ended.call_id <> sessions.call_id THEN sessions.incarnation
        WHEN ended.ran THEN coalesce(
            sessions.incarnation,
            (SELECT workers.incarnation FROM workers WHERE workers.worker_id = sessions.worker_id)
        )
    END,
    settles_at = CASE
        WHEN ended.call_id <> sessions.call_id AND NOT ended.ran THEN sessions.settles_at  -- it never came to the sandbox
        WHEN ended.settle_ms IS NULL THEN NULL
        -- what has been reported once is in every report until it is gone
        WHEN ended.call_id = sessions.call_id AND NOT EXISTS (
            SELECT 1 FROM sandboxes
            WHERE sandboxes.worker_id = sessions.worker_id AND sandboxes.session_id = sessions.session_id
        ) THEN now() + ended.settle_ms * INTERVAL '1 millisecond'
        ELSE sessions.settles_at
    END,
    expired_at = CASE WHEN ended.gone THEN now() END
FROM (
    SELECT
        unnest(CAST(:session_id AS text[])) AS session_id, unnest(CAST(:call_id AS text[])) AS call_id,
        unnest(CAST(:ran AS boolean[])) AS ran, unnest(CAST(:settle_ms AS bigint[])) AS settle_ms,
        unnest(CAST(:gone AS boolean[])) AS gone
) ended
WHERE sessions.session_id = ended.session_id AND sessions.expired_at IS NULL;

-- name: settle_sessions
-- A worker has reported the sandboxes of these sessions: later reports without them are no older than they are.
-- parameters: worker_id text, session_ids text[]
UPDATE sessions SET settles_at = NULL
WHERE worker_id = CAST(:worker_id AS text)
  AND session_id IN (SELECT unnest(CAST(:session_ids AS text[])))
  AND settles_at IS NOT NULL
  -- what ends a call has this row first, and then the sandbox's: who has that must not wait for this
  AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.session_id = sessions.session_id);

-- name: insert_session_sandboxes
-- What the first calls of sessions reserved still counts when they have ended, for the sandboxes that live on, until
-- their workers have reported them.
-- parameters: session_id text[], call_id text[], placement_id text[], worker_id text[], memory_bytes bigint[]
-- parameters: gpu_memory_bytes bigint[]
INSERT INTO sandboxes (worker_id, sandbox_id, session_id, memory_bytes, gpu_memory_bytes)
SELECT ended.worker_id, ended.placement_id, ended.session_id, ended.memory_bytes, ended.gpu_memory_bytes
FROM (
    SELECT
        unnest(CAST(:session_id AS text[])) AS session_id, unnest(CAST(:call_id AS text[])) AS call_id,
        unnest(CAST(:placement_id AS text[])) AS placement_id, unnest(CAST(:worker_id AS text[])) AS worker_id,
        unnest(CAST(:memory_bytes AS bigint[])) AS memory_bytes,
        unnest(CAST(:gpu_memory_bytes AS bigint[])) AS gpu_memory_bytes
) ended
JOIN sessions
    ON sessions.session_id = ended.session_id AND sessions.call_id = ended.call_id
   AND sessions.worker_id = ended.worker_id AND sessions.incarnation IS NOT NULL AND sessions.expired_at IS NULL
WHERE NOT EXISTS (
    SELECT 1 FROM sandboxes
    WHERE sandboxes.worker_id = ended.worker_id AND sandboxes.session_id = ended.session_id
);

-- name: forget_sessions
-- Sessions for which no sandbox was ever started are as if they had never been.
-- parameters: session_id text[]
DELETE FROM sessions
WHERE session_id IN (SELECT unnest(CAST(:session_id AS text[])))
  AND incarnation IS NULL
  AND expired_at IS NULL;

-- name: delete_forgotten_sandboxes
-- What was reported of calls for which no sandbox was started, in sessions that were forgotten with them; all lists are
-- one value a call.
-- parameters: worker_id text[], placement_id text[]
DELETE FROM sandboxes
WHERE (worker_id, placement_id) IN (
      SELECT unnest(CAST(:worker_id AS text[])), unnest(CAST(:placement_id AS text[]))
  )
  AND NOT session_id IN (SELECT session_id FROM sessions);

-- name: expire_session
-- A session is over by request.
-- parameters: session_id text
-- returns: worker_id; no row: it was over before, or it never was
UPDATE sessions SET expired_at = now()
WHERE session_id = CAST(:session_id AS text) AND expired_at IS NULL
RETURNING worker_id;

-- name: session_of
-- Whether a session is remembered.
-- parameters: session_id text
-- returns: session_id; no row: it is not
SELECT session_id FROM sessions WHERE session_id = CAST(:session_id AS text);

-- name: sessions_to_end
-- Sandboxes that a worker keeps for sessions which are over, or are not its own. Not those that still have a call, or
-- that end with one.
-- parameters: worker_id text
-- returns: session_id
SELECT DISTINCT sandboxes.session_id
FROM sandboxes
LEFT JOIN sessions
    ON sessions.session_id = sandboxes.session_id AND sessions.worker_id = sandboxes.worker_id
   AND sessions.expired_at IS NULL
LEFT JOIN leases ON leases.placement_id = sandboxes.placement_id
LEFT JOIN cancellations ON cancellations.placement_id = sandboxes.placement_id
WHERE sandboxes.worker_id = CAST(:worker_id AS text)
  AND sandboxes.session_id IS NOT NULL
  AND sessions.session_id IS NULL
  AND leases.placement_id IS NULL
  AND cancellations.placement_id IS NULL
ORDER BY sandboxes.session_id;

-- name: wait_in_sessions
-- Calls wait for their turn, each in the place where it first asked; all lists are one value a call, in their order.
-- parameters: call_id text[], session_id text[], position bigint[]
INSERT INTO session_waits (call_id, session_id, ticket, seen_at)
SELECT asked.call_id, asked.session_id, latest.ticket + asked.position, now()
FROM (
    SELECT
        unnest(CAST(:call_id AS text[])) AS call_id, unnest(CAST(:session_id AS text[])) AS session_id,
        unnest(CAST(:position AS bigint[])) AS position
) asked
CROSS JOIN (SELECT coalesce(max(ticket), 0) AS ticket FROM session_waits) latest
ON CONFLICT (call_id) DO UPDATE SET seen_at = excluded.seen_at;

-- name: stop_waiting
-- Calls that wait for no turn any more.
-- parameters: call_id text[]
DELETE FROM session_waits WHERE call_id IN (SELECT unnest(CAST(:call_id AS text[])));

-- name: delete_old_sessions
-- Sessions that were over some time ago are forgotten.
-- parameters: expired_ms bigint
DELETE FROM sessions WHERE expired_at <= now() - CAST(:expired_ms AS bigint) * INTERVAL '1 millisecond';

-- name: delete_old_session_waits
-- Calls whose routers have not asked for their turn for some time.
-- parameters: stale_ms bigint
DELETE FROM session_waits WHERE seen_at <= now() - CAST(:stale_ms AS bigint) * INTERVAL '1 millisecond';

-- name: session_rows
-- Sessions, the latest first; worker_id and state null: any.
-- parameters: worker_id text, state text, stale_ms bigint, at_most integer, skip integer
-- returns: session_id, worker_id, state, call_id (that has it now), waiting (calls), memory_bytes (of its sandbox; null:
-- none is known of), created_at, used_at, expired_at
WITH waiting AS (
    SELECT session_id, count(*) AS calls
    FROM session_waits
    WHERE seen_at > now() - CAST(:stale_ms AS bigint) * INTERVAL '1 millisecond'
    GROUP BY session_id
),
kept AS (
    SELECT worker_id, session_id, sum(memory_bytes) AS memory_bytes
    FROM sandboxes
    GROUP BY worker_id, session_id
),
ending AS (
    SELECT DISTINCT worker_id, session_id FROM cancellations WHERE session_id IS NOT NULL
),
listed AS (
    SELECT
        sessions.session_id, sessions.worker_id,
        CASE
            WHEN sessions.expired_at IS NOT NULL THEN 'expired'
            WHEN leases.placement_id IS NOT NULL OR ending.session_id IS NOT NULL THEN 'busy'
            ELSE 'idle'
        END AS state,
        leases.call_id, coalesce(waiting.calls, 0) AS waiting, CAST(kept.memory_bytes AS bigint) AS memory_bytes,
        sessions.created_at, sessions.used_at, sessions.expired_at
    FROM sessions
    LEFT JOIN leases ON leases.session_id = sessions.session_id
    LEFT JOIN ending ON ending.session_id = sessions.session_id AND ending.worker_id = sessions.worker_id
    LEFT JOIN waiting ON waiting.session_id = sessions.session_id
    LEFT JOIN kept ON kept.worker_id = sessions.worker_id AND kept.session_id = sessions.session_id
)
SELECT * FROM listed
WHERE (CAST(:worker_id AS text) IS NULL OR worker_id = CAST(:worker_id AS text))
  AND (CAST(:state AS text) IS NULL OR state = CAST(:state AS text))
ORDER BY created_at DESC, session_id COLLATE "C"
LIMIT CAST(:at_most AS integer) OFFSET CAST(:skip AS integer);
