-- What must not be in the database, whoever writes to it meanwhile. Each statement is a rule of app/check.py and gives
-- what breaks it: about (whose row it is) and found (what is wrong with it).

-- name: workers_overcommitted
-- Workers of which calls were given more than they have: each lease its budget, each session's sandbox its first call's,
-- once. What was given leaves MEMORY_HEADROOM free, so that a worker may lower its total by that much.
-- parameters: none
-- returns: about (worker), found
WITH given AS (
    SELECT worker_id, memory_bytes, gpu_memory_bytes FROM leases WHERE NOT continues
    UNION ALL
    SELECT
        sessions.worker_id, calls.memory_bytes,
        CASE WHEN calls.gpu THEN coalesce(calls.gpu_memory_bytes, workers.gpu_total_bytes, 0) ELSE 0 END
    FROM sessions
    JOIN calls ON calls.call_id = sessions.call_id
    JOIN workers ON workers.worker_id = sessions.worker_id
    WHERE sessions.expired_at IS NULL
      AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.call_id = sessions.call_id)
      AND (
          EXISTS (
              SELECT 1 FROM sandboxes
              WHERE sandboxes.worker_id = sessions.worker_id AND sandboxes.session_id = sessions.session_id
          )
          OR EXISTS (SELECT 1 FROM leases WHERE leases.session_id = sessions.session_id)
      )
),
sums AS (
    SELECT worker_id, sum(memory_bytes) AS memory_bytes, sum(gpu_memory_bytes) AS gpu_bytes, count(*) AS sandboxes
    FROM given
    GROUP BY worker_id
)
SELECT
    workers.worker_id AS about,
    concat(
        'calls were given ', sums.memory_bytes, ' of ', coalesce(CAST(workers.memory_total_bytes AS text), 'unknown'),
        ' bytes of memory, ', sums.gpu_bytes, ' of ', coalesce(CAST(workers.gpu_total_bytes AS text), 'unknown'),
        ' of GPU memory, ', sums.sandboxes, ' of ', workers.max_sandboxes, ' sandboxes'
    ) AS found
FROM workers
JOIN sums ON sums.worker_id = workers.worker_id
WHERE sums.memory_bytes > workers.memory_total_bytes
   OR sums.gpu_bytes > workers.gpu_total_bytes
   OR (workers.max_sandboxes > 0 AND sums.sandboxes > workers.max_sandboxes)
ORDER BY workers.worker_id COLLATE "C";

-- name: workers_too_full
-- Workers that have less free than placements leave, counted as rank_workers does: sandboxes may grow up to the total,
-- and a worker may lower it, or report what it should have ended.
-- parameters: headroom_ppm bigint
-- returns: about (worker), found
WITH held AS (
    SELECT worker_id, memory_bytes, gpu_memory_bytes, 1 AS sandboxes FROM sandboxes
    UNION ALL
    SELECT leases.worker_id, leases.memory_bytes, leases.gpu_memory_bytes, 1
    FROM leases
    LEFT JOIN sandboxes
        ON sandboxes.worker_id = leases.worker_id
       AND coalesce(sandboxes.session_id, sandboxes.placement_id) = coalesce(leases.session_id, leases.placement_id)
       AND (
           sandboxes.placement_id = leases.placement_id
           OR (sandboxes.session_id = leases.session_id AND (leases.continues OR leases.accepted_at IS NOT NULL))
       )
    WHERE sandboxes.sandbox_id IS NULL
),
taken AS (
    SELECT worker_id, sum(memory_bytes) AS memory_bytes, sum(gpu_memory_bytes) AS gpu_bytes, count(*) AS sandboxes
    FROM held
    GROUP BY worker_id
)
SELECT
    workers.worker_id AS about,
    concat(
        taken.memory_bytes, ' of ', coalesce(CAST(workers.memory_total_bytes AS text), 'unknown'),
        ' bytes of memory are taken, ', taken.gpu_bytes, ' of ',
        coalesce(CAST(workers.gpu_total_bytes AS text), 'unknown'), ' of GPU memory, ', taken.sandboxes, ' of ',
        workers.max_sandboxes, ' sandboxes'
    ) AS found
FROM workers
JOIN taken ON taken.worker_id = workers.worker_id
WHERE CAST(taken.memory_bytes AS decimal(38, 0)) * 1000000
        > CAST(workers.memory_total_bytes AS decimal(38, 0)) * CAST(:headroom_ppm AS bigint)
   OR taken.gpu_bytes > workers.gpu_total_bytes  -- a call may have the whole
   OR (workers.max_sandboxes > 0 AND taken.sandboxes > workers.max_sandboxes)
ORDER BY workers.worker_id COLLATE "C";

-- name: calls_without_lease
-- Calls that go on, and for which nothing is reserved: nothing would end them.
-- parameters: none
-- returns: about (call), found
SELECT calls.call_id AS about, concat('it is ', calls.state, ' and has no lease') AS found
FROM calls
LEFT JOIN leases ON leases.call_id = calls.call_id
WHERE calls.state IN ('placed', 'accepted') AND leases.call_id IS NULL
ORDER BY calls.call_id;

-- name: leases_without_call
-- Leases of calls that have ended, or never were.
-- parameters: none
-- returns: about (placement), found
SELECT
    leases.placement_id AS about,
    concat('call ', leases.call_id, coalesce(concat(' is ', calls.state), ' is not there')) AS found
FROM leases
LEFT JOIN calls ON calls.call_id = leases.call_id
WHERE calls.call_id IS NULL OR calls.state NOT IN ('placed', 'accepted')
ORDER BY leases.placement_id;

-- name: leases_unlike_calls
-- Leases that differ from what their calls say of the same placement.
-- parameters: none
-- returns: about (placement), found
SELECT
    leases.placement_id AS about,
    concat(
        'call ', calls.call_id, ' is ', calls.state, ' by placement ', coalesce(calls.placement_id, 'none'), ' on worker ',
        coalesce(calls.worker_id, 'none'), ', the lease is on ', leases.worker_id,
        CASE WHEN leases.accepted_at IS NULL THEN ', not accepted' ELSE ', accepted' END
    ) AS found
FROM leases
JOIN calls ON calls.call_id = leases.call_id
WHERE calls.state IN ('placed', 'accepted')
  AND (
      leases.placement_id IS DISTINCT FROM calls.placement_id
      OR leases.worker_id IS DISTINCT FROM calls.worker_id
      OR leases.worker_flavor IS DISTINCT FROM calls.worker_flavor
      OR leases.generation IS DISTINCT FROM calls.generation
      OR leases.checkpoint_id IS DISTINCT FROM calls.checkpoint_id
      OR leases.checkpoint_flavor IS DISTINCT FROM calls.checkpoint_flavor
      OR leases.session_id IS DISTINCT FROM calls.session_id
      OR leases.continues <> calls.continues
      OR leases.gpu <> calls.gpu
      OR leases.memory_bytes <> calls.memory_bytes
      OR (leases.accepted_at IS NOT NULL) <> (calls.state = 'accepted')
      OR (leases.accepted_at IS NULL) <> (calls.accepted_at IS NULL)
      OR (leases.accepted_at IS NULL) <> (leases.incarnation IS NULL)
  )
ORDER BY leases.placement_id;

-- name: leases_of_unknown_workers
-- Leases on workers that are not there: a worker is evicted after its leases have ended, but for calls that wait for room.
-- parameters: none
-- returns: about (placement), found
SELECT leases.placement_id AS about, concat('there is no worker ', leases.worker_id) AS found
FROM leases
LEFT JOIN workers ON workers.worker_id = leases.worker_id
LEFT JOIN calls ON calls.call_id = leases.call_id
WHERE workers.worker_id IS NULL AND (leases.accepted_at IS NOT NULL OR coalesce(calls.queue_ms, 0) = 0)
ORDER BY leases.placement_id;

-- name: leases_overdue
-- Leases that some sweeps should have ended: no router sweeps, or it cannot end them. Not of calls that wait for room.
-- parameters: ttl_ms bigint, late_ms bigint
-- returns: about (placement), found
SELECT
    leases.placement_id AS about,
    CASE
        WHEN leases.deadline_at <= now() - CAST(:late_ms AS bigint) * INTERVAL '1 millisecond'
            THEN concat('its time was over at ', leases.deadline_at)
        ELSE concat('worker ', leases.worker_id, ' was heard last at ', workers.heard_at)
    END AS found
FROM leases
LEFT JOIN workers ON workers.worker_id = leases.worker_id
LEFT JOIN calls ON calls.call_id = leases.call_id
WHERE (
      leases.deadline_at <= now() - CAST(:late_ms AS bigint) * INTERVAL '1 millisecond'
   OR workers.heard_at <= now() - (CAST(:ttl_ms AS bigint) + CAST(:late_ms AS bigint)) * INTERVAL '1 millisecond'
  )
  -- unless its call waits for room elsewhere
  AND (
      leases.accepted_at IS NOT NULL OR coalesce(calls.queue_ms, 0) = 0
      OR leases.deadline_at <= now() - (CAST(:late_ms AS bigint) + calls.queue_ms) * INTERVAL '1 millisecond'
  )
ORDER BY leases.placement_id;

-- name: calls_without_payload
-- Calls that go on without their function and arguments: no agent would get them.
-- parameters: none
-- returns: about (call), found
SELECT calls.call_id AS about, concat('it is ', calls.state, ' and has no payload') AS found
FROM calls
LEFT JOIN call_payloads ON call_payloads.call_id = calls.call_id
WHERE calls.state IN ('placed', 'accepted') AND call_payloads.call_id IS NULL
ORDER BY calls.call_id;

-- name: calls_with_an_early_end
-- Calls that go on, and of which something says that they have ended.
-- parameters: none
-- returns: about (call), found
SELECT
    calls.call_id AS about,
    concat(
        'it is ', calls.state, ', and there is', CASE WHEN calls.finished_at IS NOT NULL THEN ' a time of its end' END,
        CASE WHEN calls.outcome IS NOT NULL THEN ' an outcome' END,
        CASE WHEN call_results.call_id IS NOT NULL THEN ' a result' END
    ) AS found
FROM calls
LEFT JOIN call_results ON call_results.call_id = calls.call_id
WHERE calls.state IN ('placed', 'accepted')
  AND (calls.finished_at IS NOT NULL OR calls.outcome IS NOT NULL OR call_results.call_id IS NOT NULL)
ORDER BY calls.call_id;

-- name: calls_without_end
-- Calls that have ended, and do not say when and how.
-- parameters: none
-- returns: about (call), found
SELECT
    call_id AS about,
    concat(
        'it is ', state, ', its outcome ', coalesce(outcome, 'missing'),
        CASE WHEN finished_at IS NULL THEN ', the time missing' END
    ) AS found
FROM calls
WHERE state NOT IN ('placed', 'accepted')
  AND (
      finished_at IS NULL
      OR CASE
          WHEN state = 'finished' THEN coalesce(outcome NOT IN ('returned', 'raised'), TRUE)
          WHEN state = 'cancelled' THEN coalesce(outcome <> 'cancelled', TRUE)
          ELSE coalesce(outcome IN ('returned', 'raised', 'cancelled'), TRUE)
      END
  )
ORDER BY call_id;

-- name: calls_without_result
-- Calls that have ended, and whose result is not there although it is not old. The last minute of its time is not
-- looked at: who drops it has a clock some milliseconds later.
-- parameters: read_ms bigint, unread_ms bigint
-- returns: about (call), found
SELECT calls.call_id AS about, concat('it ended at ', calls.finished_at, ', and its result is not there') AS found
FROM calls
LEFT JOIN call_results ON call_results.call_id = calls.call_id
WHERE calls.state NOT IN ('placed', 'accepted')
  AND call_results.call_id IS NULL
  AND calls.finished_at > now() - (CAST(:unread_ms AS bigint) - 60000) * INTERVAL '1 millisecond'
  AND coalesce(calls.read_at > now() - (CAST(:read_ms AS bigint) - 60000) * INTERVAL '1 millisecond', TRUE)
ORDER BY calls.call_id;

-- name: calls_miscounted
-- Calls whose number of placements is not that of their latest one.
-- parameters: none
-- returns: about (call), found
SELECT
    call_id AS about,
    concat('it was placed ', attempts, ' times, and its placement is ', coalesce(placement_id, 'none')) AS found
FROM calls
WHERE placement_id IS DISTINCT FROM concat(call_id, '-', attempts)
ORDER BY call_id;

-- name: calls_of_another_flavor
-- Calls that were placed by a catalogue of the other flavor than their worker's.
-- parameters: none
-- returns: about (call), found
SELECT
    calls.call_id AS about,
    concat('its worker is ', calls.worker_flavor, ', its catalogue ', catalogues.flavor) AS found
FROM calls
JOIN catalogues ON catalogues.catalogue_id = calls.catalogue_id
WHERE catalogues.flavor IS DISTINCT FROM calls.worker_flavor
ORDER BY calls.call_id;

-- name: leases_of_another_flavor
-- Leases that an agent has accepted which is of the other flavor. Those of an earlier agent are swept.
-- parameters: none
-- returns: about (placement), found
SELECT
    leases.placement_id AS about,
    concat('it is for a ', leases.worker_flavor, ' worker, and ', workers.worker_id, ' is ', workers.flavor) AS found
FROM leases
JOIN workers ON workers.worker_id = leases.worker_id AND workers.incarnation = leases.incarnation
WHERE workers.flavor <> leases.worker_flavor
ORDER BY leases.placement_id;

-- name: leases_unlike_sessions
-- Calls that have a session which is over, is not there, or is on another worker; and calls that begin one which is
-- another's, or go on in one that nobody has begun.
-- parameters: none
-- returns: about (placement), found
SELECT
    leases.placement_id AS about,
    CASE
        WHEN sessions.session_id IS NULL THEN concat('session ', leases.session_id, ' is not there')
        WHEN sessions.expired_at IS NOT NULL THEN concat('session ', leases.session_id, ' is over')
        WHEN sessions.worker_id <> leases.worker_id
            THEN concat('session ', leases.session_id, ' is on ', sessions.worker_id, ', not ', leases.worker_id)
        ELSE concat('session ', leases.session_id, ' was begun by ', sessions.call_id)
    END AS found
FROM leases
LEFT JOIN sessions ON sessions.session_id = leases.session_id
WHERE leases.session_id IS NOT NULL
  AND (
      sessions.session_id IS NULL OR sessions.expired_at IS NOT NULL OR sessions.worker_id <> leases.worker_id
      OR (sessions.call_id = leases.call_id) = leases.continues
      OR (leases.continues AND sessions.incarnation IS NULL)
  )
ORDER BY leases.placement_id;

-- name: sessions_without_call
-- Sessions whose first call is not there: what they have cannot be known.
-- parameters: none
-- returns: about (session), found
SELECT sessions.session_id AS about, concat('call ', sessions.call_id, ' is not there') AS found
FROM sessions
LEFT JOIN calls ON calls.call_id = sessions.call_id
WHERE calls.call_id IS NULL
ORDER BY sessions.session_id;

-- name: sessions_with_two_sandboxes
-- Sessions that count more than once on their worker.
-- parameters: none
-- returns: about (session), found
SELECT session_id AS about, concat('it has ', count(*), ' sandboxes on worker ', worker_id) AS found
FROM sandboxes
WHERE session_id IS NOT NULL
GROUP BY worker_id, session_id
HAVING count(*) > 1
ORDER BY session_id, worker_id;

-- name: sessions_elsewhere
-- Sandboxes of sessions that go on with another one, on another worker. They are to be ended, and soon gone.
-- parameters: none
-- returns: about (session), found
SELECT
    sessions.session_id AS about,
    concat('it is on worker ', sessions.worker_id, ', and ', sandboxes.worker_id, ' has a sandbox of it too') AS found
FROM sandboxes
JOIN sessions ON sessions.session_id = sandboxes.session_id AND sessions.worker_id <> sandboxes.worker_id
WHERE sessions.expired_at IS NULL
ORDER BY sessions.session_id, sandboxes.worker_id;

-- name: cancellations_with_lease
-- Placements that an agent is to end, although they go on.
-- parameters: none
-- returns: about (placement), found
SELECT cancellations.placement_id AS about, concat('it has a lease on worker ', leases.worker_id) AS found
FROM cancellations
JOIN leases ON leases.placement_id = cancellations.placement_id
ORDER BY cancellations.placement_id;

-- name: rows_without_call
-- What is kept of calls that are not there.
-- parameters: none
-- returns: about (call), found
SELECT kept.call_id AS about, concat('it is not there, and has rows in ', kept.place) AS found
FROM (
    SELECT call_id, 'call_payloads' AS place FROM call_payloads
    UNION
    SELECT call_id, 'call_modules' FROM call_modules
    UNION
    SELECT call_id, 'call_packages' FROM call_packages
    UNION
    SELECT call_id, 'call_output' FROM call_output
    UNION
    SELECT call_id, 'call_results' FROM call_results
) kept
LEFT JOIN calls ON calls.call_id = kept.call_id
WHERE calls.call_id IS NULL
ORDER BY kept.call_id, kept.place;

-- name: rows_without_worker
-- What is kept of workers that are not there.
-- parameters: none
-- returns: about (worker), found
SELECT kept.worker_id AS about, concat('it is not there, and has rows in ', kept.place) AS found
FROM (
    SELECT worker_id, 'worker_generations' AS place FROM worker_generations
    UNION
    SELECT worker_id, 'worker_checkpoints' FROM worker_checkpoints
    UNION
    SELECT worker_id, 'sandboxes' FROM sandboxes
) kept
LEFT JOIN workers ON workers.worker_id = kept.worker_id
WHERE workers.worker_id IS NULL
ORDER BY kept.worker_id COLLATE "C", kept.place;

-- name: times_to_come
-- Times of what has happened that lie in the future, and times to accept that no setting gives: the clock was set back.
-- parameters: future_ms bigint, accept_ms bigint
-- returns: about (whose time it is), found
SELECT noted.about, concat(noted.what, ' ', noted.noted_at) AS found
FROM (
    SELECT concat('worker ', worker_id) AS about, 'heard at' AS what, heard_at AS noted_at FROM workers
    UNION ALL
    SELECT concat('call ', call_id), 'created at', created_at FROM calls
    UNION ALL
    SELECT concat('call ', call_id), 'accepted at', accepted_at FROM calls
    UNION ALL
    SELECT concat('call ', call_id), 'finished at', finished_at FROM calls
    UNION ALL
    SELECT concat('call ', call_id), 'read at', read_at FROM calls
    UNION ALL
    SELECT concat('placement ', placement_id), 'placed at', placed_at FROM leases
    UNION ALL
    SELECT concat('placement ', placement_id), 'accepted at', accepted_at FROM leases
    UNION ALL
    -- Of one that is accepted the agent says what its start may take.
    SELECT
        concat('placement ', placement_id), 'to be accepted by',
        deadline_at - CAST(:accept_ms AS bigint) * INTERVAL '1 millisecond'
    FROM leases
    WHERE accepted_at IS NULL
    UNION ALL
    SELECT concat('placement ', placement_id), 'cancelled at', created_at FROM cancellations
    UNION ALL
    SELECT concat('session ', session_id), 'begun at', created_at FROM sessions
    UNION ALL
    SELECT concat('session ', session_id), 'used at', used_at FROM sessions
    UNION ALL
    SELECT concat('session ', session_id), 'settled at', settles_at FROM sessions
    UNION ALL
    SELECT concat('session ', session_id), 'over at', expired_at FROM sessions
    UNION ALL
    SELECT concat('call ', call_id), 'waiting at', seen_at FROM session_waits
) noted
WHERE noted.noted_at > now() + CAST(:future_ms AS bigint) * INTERVAL '1 millisecond'
ORDER BY noted.about, noted.what;

-- name: catalogues_not_whole
-- Active catalogues that are not there, or of which rows are missing.
-- parameters: none
-- returns: about (flavor), found
WITH active AS (
    SELECT active_catalogues.flavor, active_catalogues.catalogue_id, catalogues.item_count,
        catalogues.checkpoint_count, catalogues.distribution_count, catalogues.flavor AS its_flavor
    FROM active_catalogues
    LEFT JOIN catalogues ON catalogues.catalogue_id = active_catalogues.catalogue_id
),
counted AS (
    SELECT
        active.*,
        (SELECT count(*) FROM items WHERE items.catalogue_id = active.catalogue_id) AS items,
        (SELECT count(*) FROM checkpoints WHERE checkpoints.catalogue_id = active.catalogue_id) AS checkpoints,
        (SELECT count(*) FROM contents WHERE contents.catalogue_id = active.catalogue_id) AS contents,
        (SELECT count(*) FROM distributions WHERE distributions.catalogue_id = active.catalogue_id) AS distributions,
        (
            SELECT count(*) FROM closures WHERE closures.catalogue_id = active.catalogue_id AND closures.closure_id = -1
        ) AS roots,
        (
            SELECT count(*) FROM items
            WHERE items.catalogue_id = active.catalogue_id
              AND NOT EXISTS (
                  SELECT 1 FROM closures
                  WHERE closures.catalogue_id = items.catalogue_id AND closures.closure_id = items.closure_id
              )
        ) AS open_items
    FROM active
)
SELECT
    flavor AS about,
    CASE
        WHEN item_count IS NULL THEN concat('catalogue ', catalogue_id, ' is not there')
        ELSE concat(
            'catalogue ', catalogue_id, ' is for ', its_flavor, ' and has ', items, ' of ', item_count, ' items, ',
            checkpoints, ' of ', checkpoint_count, ' checkpoints, ', contents, ' of their contents, ', distributions,
            ' of ', distribution_count, ' distributions, ', open_items, ' items without a closure'
        )
    END AS found
FROM counted
WHERE item_count IS NULL
   OR its_flavor <> flavor
   OR items <> item_count
   OR checkpoints <> checkpoint_count
   OR contents <> checkpoint_count
   OR distributions <> distribution_count
   OR roots <> 1
   OR open_items > 0
ORDER BY flavor;
