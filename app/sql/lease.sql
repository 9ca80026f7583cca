-- What happens to a placement after it was reserved: handed over, accepted, ended; and what workers report.
-- A lease is deleted by whoever ends it, in one statement that says whether it was there: so each ends once.

-- name: upsert_worker
-- A worker as it reports itself; it was heard now. Not by a report that is older than another of the same agent.
-- parameters: worker_id text, flavor text, state text, runtime text, python text, markers text
-- parameters: memory_total_bytes bigint, gpu_total_bytes bigint, max_sandboxes integer, base_bytes bigint
-- parameters: incarnation text, report bigint, kept_memory_bytes bigint, kept_gpu_memory_bytes bigint
-- parameters: kept_sandboxes bigint
-- report: they count from 1; 0: the agent does not count. kept: of the sandboxes that it reports without a call.
-- returns: worker_id; no row: the report came too late
INSERT INTO workers (
    worker_id, flavor, state, runtime, python, markers, memory_total_bytes, gpu_total_bytes, max_sandboxes,
    base_bytes, incarnation, heard_at, report, kept_memory_bytes, kept_gpu_memory_bytes, kept_sandboxes
)
VALUES (
    CAST(:worker_id AS text), CAST(:flavor AS text), CAST(:state AS text), CAST(:runtime AS text),
    CAST(:python AS text), CAST(:markers AS text), CAST(:memory_total_bytes AS bigint),
    CAST(:gpu_total_bytes AS bigint), CAST(:max_sandboxes AS integer), CAST(:base_bytes AS bigint),
    CAST(:incarnation AS text), now(), CAST(:report AS bigint), CAST(:kept_memory_bytes AS bigint),
    CAST(:kept_gpu_memory_bytes AS bigint), CAST(:kept_sandboxes AS bigint)
)
ON CONFLICT (worker_id) DO UPDATE SET
    flavor = excluded.flavor, state = excluded.state, runtime = excluded.runtime, python = excluded.python,
    markers = excluded.markers, memory_total_bytes = excluded.memory_total_bytes,
    gpu_total_bytes = excluded.gpu_total_bytes, max_sandboxes = excluded.max_sandboxes,
    base_bytes = excluded.base_bytes, incarnation = excluded.incarnation, heard_at = excluded.heard_at,
    report = excluded.report, kept_memory_bytes = excluded.kept_memory_bytes,
    kept_gpu_memory_bytes = excluded.kept_gpu_memory_bytes, kept_sandboxes = excluded.kept_sandboxes
WHERE workers.incarnation <> excluded.incarnation OR excluded.report = 0 OR workers.report < excluded.report
RETURNING worker_id;

-- name: delete_worker_generations
-- Forgets what a worker held.
-- parameters: worker_id text
DELETE FROM worker_generations WHERE worker_id = CAST(:worker_id AS text);

-- name: insert_worker_generations
-- The generations that a worker holds, each with its fixed seconds in nanoseconds; all lists are of one length.
-- parameters: worker_id text, generations text[], restore_fixed_ns bigint[], cold_fixed_ns bigint[]
INSERT INTO worker_generations (worker_id, generation, restore_fixed_ns, cold_fixed_ns)
SELECT
    CAST(:worker_id AS text), unnest(CAST(:generations AS text[])), unnest(CAST(:restore_fixed_ns AS bigint[])),
    unnest(CAST(:cold_fixed_ns AS bigint[]));

-- name: delete_worker_checkpoints
-- Forgets what a worker offered.
-- parameters: worker_id text
DELETE FROM worker_checkpoints WHERE worker_id = CAST(:worker_id AS text);

-- name: insert_worker_checkpoints
-- The checkpoints that a worker offers; both lists are of one length.
-- parameters: worker_id text, generations text[], checkpoint_ids text[]
INSERT INTO worker_checkpoints (worker_id, generation, checkpoint_id)
SELECT CAST(:worker_id AS text), unnest(CAST(:generations AS text[])), unnest(CAST(:checkpoint_ids AS text[]));

-- name: delete_sandboxes
-- Forgets what lived on a worker, but for a session's sandbox that may be too new for the report that comes now.
-- parameters: worker_id text, session_ids text[]
-- The sessions of which the report has a sandbox.
DELETE FROM sandboxes
WHERE worker_id = CAST(:worker_id AS text)
  AND NOT (
      session_id IS NOT NULL
      AND NOT session_id IN (SELECT unnest(CAST(:session_ids AS text[])))
      AND EXISTS (
          SELECT 1 FROM sessions
          WHERE sessions.session_id = sandboxes.session_id AND sessions.worker_id = sandboxes.worker_id
            AND sessions.expired_at IS NULL AND sessions.settles_at > now()
      )
  );

-- name: insert_sandboxes
-- The sandboxes that a worker reports; all lists are of one length. Those without a call are kept.
-- parameters: worker_id text, sandbox_ids text[], placement_ids text[], session_ids text[], memory_bytes bigint[]
-- parameters: gpu_memory_bytes bigint[]
INSERT INTO sandboxes (worker_id, sandbox_id, placement_id, session_id, memory_bytes, gpu_memory_bytes, kept)
SELECT
    CAST(:worker_id AS text), reported.sandbox_id, reported.placement_id, reported.session_id, reported.memory_bytes,
    reported.gpu_memory_bytes, reported.placement_id IS NULL
FROM (
    SELECT
        unnest(CAST(:sandbox_ids AS text[])) AS sandbox_id, unnest(CAST(:placement_ids AS text[])) AS placement_id,
        unnest(CAST(:session_ids AS text[])) AS session_id, unnest(CAST(:memory_bytes AS bigint[])) AS memory_bytes,
        unnest(CAST(:gpu_memory_bytes AS bigint[])) AS gpu_memory_bytes
) reported;

-- name: keep_no_more
-- What a report has left of a worker's sandboxes is not among those that the worker's row counts.
-- parameters: worker_id text
UPDATE sandboxes SET kept = FALSE WHERE worker_id = CAST(:worker_id AS text) AND kept;

-- name: worker_news
-- Whether a worker is known, and whether there may be something for it to do.
-- parameters: worker_id text
-- returns: has_run (placements that it has not accepted), has_cancel, keeps_sessions; no row: no such worker
SELECT
    EXISTS (
        SELECT 1 FROM leases WHERE leases.worker_id = CAST(:worker_id AS text) AND leases.accepted_at IS NULL
    ) AS has_run,
    EXISTS (SELECT 1 FROM cancellations WHERE cancellations.worker_id = CAST(:worker_id AS text)) AS has_cancel,
    EXISTS (
        SELECT 1 FROM sandboxes
        WHERE sandboxes.worker_id = CAST(:worker_id AS text) AND sandboxes.session_id IS NOT NULL
    ) AS keeps_sessions
FROM workers
WHERE workers.worker_id = CAST(:worker_id AS text);

-- name: placements_to_run
-- What a worker that is ready has not accepted yet, oldest first; few at a time, because of the payloads.
-- parameters: worker_id text, at_most integer
-- returns: one row a placement, with all that the agent needs but modules and packages; queue in seconds
SELECT
    leases.placement_id, leases.call_id, call_payloads.payload, calls.function, calls.python, leases.memory_bytes,
    calls.max_memory_bytes, leases.gpu, leases.gpu_memory_bytes, calls.timeout_ms, leases.generation,
    leases.checkpoint_id, leases.session_id, leases.continues,
    CAST(extract(epoch FROM now() - leases.placed_at) AS double precision) AS queue
FROM leases
JOIN workers
    ON workers.worker_id = leases.worker_id AND workers.flavor = leases.worker_flavor AND workers.state = 'ready'
JOIN calls ON calls.call_id = leases.call_id
JOIN call_payloads ON call_payloads.call_id = leases.call_id
WHERE leases.worker_id = CAST(:worker_id AS text) AND leases.accepted_at IS NULL
ORDER BY leases.placed_at, leases.placement_id
LIMIT CAST(:at_most AS integer);

-- name: names_to_run
-- The modules of some calls, and the requirements that their root filesystem does not have, each in their order.
-- parameters: call_ids text[]
-- returns: call_id, is_module, name, position
SELECT call_id, TRUE AS is_module, module AS name, position FROM call_modules
WHERE call_id IN (SELECT unnest(CAST(:call_ids AS text[])))
UNION ALL
SELECT call_id, FALSE, requirement, position FROM call_packages
WHERE NOT skipped AND call_id IN (SELECT unnest(CAST(:call_ids AS text[])))
ORDER BY call_id, is_module, position;

-- name: installed_for_call
-- The requirements of a call that its root filesystem did not have.
-- parameters: call_id text
-- returns: requirement
SELECT requirement FROM call_packages WHERE call_id = CAST(:call_id AS text) AND NOT skipped;

-- name: placements_to_cancel
-- What a worker accepted, and has to end.
-- parameters: worker_id text
-- returns: placement_id
SELECT placement_id FROM cancellations WHERE worker_id = CAST(:worker_id AS text) ORDER BY created_at, placement_id;

-- name: accept_leases
-- Workers take placements that are their own and that they have not accepted before. From now on the deadline is the
-- function's timeout and what a start may take.
-- parameters: placement_ids text[], worker_ids text[], incarnations text[], start_ms bigint[]
-- One placement a position, with who takes it: the worker, and the agent that speaks for it (null: whichever does). Of
-- two agents with one worker id that one accepts which reported last.
-- returns: placement_id, call_id, worker_id, session_id, incarnation of those that are accepted now
UPDATE leases SET
    accepted_at = now(), incarnation = takers.incarnation,
    deadline_at = now() + (takers.start_ms + calls.timeout_ms) * INTERVAL '1 millisecond'
FROM (
    SELECT asked.placement_id, asked.worker_id, workers.incarnation, max(asked.start_ms) AS start_ms
    FROM (
        SELECT
            unnest(CAST(:placement_ids AS text[])) AS placement_id, unnest(CAST(:worker_ids AS text[])) AS worker_id,
            unnest(CAST(:incarnations AS text[])) AS incarnation, unnest(CAST(:start_ms AS bigint[])) AS start_ms
    ) asked
    JOIN workers ON workers.worker_id = asked.worker_id
    WHERE asked.incarnation IS NULL OR asked.incarnation = workers.incarnation
    GROUP BY asked.placement_id, asked.worker_id, workers.incarnation
) takers, calls
WHERE leases.placement_id = takers.placement_id AND leases.worker_id = takers.worker_id
  AND leases.accepted_at IS NULL AND calls.call_id = leases.call_id
RETURNING leases.placement_id, leases.call_id, leases.worker_id, leases.session_id, leases.incarnation;

-- name: accept_calls
-- Workers run these calls.
-- parameters: call_ids text[]
UPDATE calls SET state = 'accepted', accepted_at = now()
WHERE call_id IN (SELECT unnest(CAST(:call_ids AS text[])));

-- name: holders_of_placements
-- Who holds placements.
-- parameters: placement_ids text[]
-- returns: placement_id, worker_id, call_id, incarnation (null: it is not accepted); no row: it has ended
SELECT placement_id, worker_id, call_id, incarnation FROM leases
WHERE placement_id IN (SELECT unnest(CAST(:placement_ids AS text[])));

-- name: insert_output
-- A piece of what a call printed; one that is there already is left.
-- parameters: call_id text, placement_id text, sequence integer, stream text, text text
INSERT INTO call_output (call_id, placement_id, sequence, stream, text)
VALUES (
    CAST(:call_id AS text), CAST(:placement_id AS text), CAST(:sequence AS integer), CAST(:stream AS text),
    CAST(:text AS text)
)
ON CONFLICT DO NOTHING;

-- name: end_lease
-- Gives back what a placement reserved.
-- parameters: placement_id text, accepted boolean
-- returns: placement_id, call_id, worker_id, accepted, memory_bytes, gpu_memory_bytes, session_id, continues; no row: it
-- has ended, or its acceptance is not as said (null: either)
DELETE FROM leases
WHERE placement_id = CAST(:placement_id AS text)
  AND (CAST(:accepted AS boolean) IS NULL OR (accepted_at IS NOT NULL) = CAST(:accepted AS boolean))
RETURNING
    placement_id, call_id, worker_id, accepted_at IS NOT NULL AS accepted, memory_bytes, gpu_memory_bytes, session_id,
    continues;

-- name: end_leases
-- Gives back what placements reserved.
-- parameters: placement_ids text[]
-- returns: placement_id, call_id, worker_id, memory_bytes, gpu_memory_bytes, session_id, continues of those that had not
-- ended
DELETE FROM leases WHERE placement_id IN (SELECT unnest(CAST(:placement_ids AS text[])))
RETURNING placement_id, call_id, worker_id, memory_bytes, gpu_memory_bytes, session_id, continues;

-- name: end_lease_of_call
-- Gives back what a call's placement reserved.
-- parameters: call_id text
-- returns: as end_lease
DELETE FROM leases WHERE call_id = CAST(:call_id AS text)
RETURNING
    placement_id, call_id, worker_id, accepted_at IS NOT NULL AS accepted, memory_bytes, gpu_memory_bytes, session_id,
    continues;

-- name: end_lease_of_session
-- Gives back what the call reserved that has a session.
-- parameters: session_id text
-- returns: as end_lease
DELETE FROM leases WHERE session_id = CAST(:session_id AS text)
RETURNING
    placement_id, call_id, worker_id, accepted_at IS NOT NULL AS accepted, memory_bytes, gpu_memory_bytes, session_id,
    continues;

-- name: finish_calls
-- How calls ended; all lists are one value a call.
-- parameters: call_id text[], state text[], outcome text[], started text[], measured_ready_ns bigint[]
-- returns: outcome, predicted_ready_ns, measured_ready_ns
UPDATE calls SET
    state = ended.state, outcome = ended.outcome, started = ended.started,
    measured_ready_ns = ended.measured_ready_ns, finished_at = now()
FROM (
    SELECT
        unnest(CAST(:call_id AS text[])) AS call_id, unnest(CAST(:state AS text[])) AS state,
        unnest(CAST(:outcome AS text[])) AS outcome, unnest(CAST(:started AS text[])) AS started,
        unnest(CAST(:measured_ready_ns AS bigint[])) AS measured_ready_ns
) ended
WHERE calls.call_id = ended.call_id
RETURNING calls.outcome, calls.predicted_ready_ns, calls.measured_ready_ns;

-- name: insert_results
-- Calls' results, as MessagePack.
-- parameters: call_id text[], result bytea[]
INSERT INTO call_results (call_id, result)
SELECT unnest(CAST(:call_id AS text[])), unnest(CAST(:result AS bytea[]));

-- name: delete_sandboxes_of_placements
-- Sandboxes end with their calls, unless a session keeps them.
-- parameters: worker_ids text[], placement_ids text[]
DELETE FROM sandboxes
WHERE session_id IS NULL
  AND (worker_id, placement_id) IN (
      SELECT unnest(CAST(:worker_ids AS text[])), unnest(CAST(:placement_ids AS text[]))
  );

-- name: latest_placements
-- The placements that calls have, or had last.
-- parameters: call_ids text[]
-- returns: placement_id
SELECT placement_id FROM calls WHERE call_id IN (SELECT unnest(CAST(:call_ids AS text[])));

-- name: insert_cancellation
-- The agent has to end this placement.
-- parameters: placement_id text, worker_id text, session_id text
INSERT INTO cancellations (placement_id, worker_id, created_at, session_id)
VALUES (CAST(:placement_id AS text), CAST(:worker_id AS text), now(), CAST(:session_id AS text))
ON CONFLICT DO NOTHING;

-- name: delete_cancellations
-- The agents have ended these placements.
-- parameters: placement_ids text[]
-- returns: placement_id, worker_id, session_id of those that were to be ended
DELETE FROM cancellations WHERE placement_id IN (SELECT unnest(CAST(:placement_ids AS text[])))
RETURNING placement_id, worker_id, session_id;

-- name: delete_done_cancellations
-- What a worker was to end some time ago, and does not report: it does not know it any more.
-- parameters: worker_id text, placement_ids text[], settle_ms bigint
DELETE FROM cancellations
WHERE worker_id = CAST(:worker_id AS text)
  AND created_at < now() - CAST(:settle_ms AS bigint) * INTERVAL '1 millisecond'
  AND NOT placement_id IN (SELECT unnest(CAST(:placement_ids AS text[])));

-- name: insert_unreported_sandbox
-- What an ended placement reserved still counts until its worker reports again, because its sandbox may live.
-- parameters: worker_id text, placement_id text, session_id text, memory_bytes bigint, gpu_memory_bytes bigint
INSERT INTO sandboxes (worker_id, sandbox_id, placement_id, session_id, memory_bytes, gpu_memory_bytes)
SELECT
    CAST(:worker_id AS text), CAST(:placement_id AS text), CAST(:placement_id AS text), CAST(:session_id AS text),
    CAST(:memory_bytes AS bigint), CAST(:gpu_memory_bytes AS bigint)
WHERE NOT EXISTS (
    SELECT 1 FROM sandboxes
    WHERE worker_id = CAST(:worker_id AS text)
      AND (placement_id = CAST(:placement_id AS text) OR session_id = CAST(:session_id AS text))
);

-- name: call_status
-- A call, its latest placement and its result; has_output: that placement has printed something.
-- parameters: call_id text
SELECT
    EXISTS (
        SELECT 1 FROM call_output
        WHERE call_output.call_id = calls.call_id AND call_output.placement_id = calls.placement_id
    ) AS has_output,
    calls.call_id, calls.state, calls.function, calls.created_at, calls.read_at IS NOT NULL AS was_read,
    calls.placement_id, calls.worker_id, calls.worker_flavor, calls.generation, calls.checkpoint_id,
    calls.cost_ns, calls.cold_cost_ns, calls.predicted_ready_ns, calls.reason, call_results.result
FROM calls
LEFT JOIN call_results ON call_results.call_id = calls.call_id
WHERE calls.call_id = CAST(:call_id AS text);

-- name: output_of_call
-- What a placement of a call has printed so far, in its order.
-- parameters: call_id text, placement_id text
-- returns: stream, text
SELECT stream, text FROM call_output
WHERE call_id = CAST(:call_id AS text) AND placement_id = CAST(:placement_id AS text)
ORDER BY sequence;

-- name: mark_read
-- The ends of calls were read; the first time counts.
-- parameters: call_ids text[]
UPDATE calls SET read_at = now()
WHERE call_id IN (SELECT unnest(CAST(:call_ids AS text[]))) AND read_at IS NULL;

-- name: due_leases
-- Leases that cannot go on as they are, oldest first, and why. The database's clock decides.
-- parameters: ttl_ms bigint
-- returns: placement_id, accepted, cause (silent: its worker was not heard from; restarted: another process speaks
-- for its worker, or it has another flavor; leaving: its worker takes nothing new; deadline: its time is over), may_wait
-- (its call has not run, and has time left to wait for room: that counts from when it should have been accepted)
SELECT leases.placement_id, leases.accepted_at IS NOT NULL AS accepted,
    leases.accepted_at IS NULL AND coalesce(calls.queue_ms, 0) > 0
        AND now() < leases.deadline_at + calls.queue_ms * INTERVAL '1 millisecond' AS may_wait,
    CASE
        WHEN workers.worker_id IS NULL OR workers.heard_at <= now() - CAST(:ttl_ms AS bigint) * INTERVAL '1 millisecond'
            THEN 'silent'
        WHEN leases.incarnation <> workers.incarnation OR leases.worker_flavor <> workers.flavor THEN 'restarted'
        WHEN leases.accepted_at IS NULL AND workers.state = 'removed' THEN 'leaving'
        ELSE 'deadline'
    END AS cause
FROM leases
LEFT JOIN calls ON calls.call_id = leases.call_id
LEFT JOIN workers ON workers.worker_id = leases.worker_id
WHERE workers.worker_id IS NULL
   OR workers.heard_at <= now() - CAST(:ttl_ms AS bigint) * INTERVAL '1 millisecond'
   OR leases.incarnation <> workers.incarnation OR leases.worker_flavor <> workers.flavor
   OR (leases.accepted_at IS NULL AND workers.state = 'removed')
   OR leases.deadline_at <= now()
ORDER BY leases.placed_at, leases.placement_id;

-- name: silent_workers
-- Workers that were not heard from in time, and hold no lease any more but for calls that wait for room elsewhere.
-- parameters: ttl_ms bigint
-- returns: worker_id
SELECT worker_id FROM workers
WHERE heard_at <= now() - CAST(:ttl_ms AS bigint) * INTERVAL '1 millisecond'
  AND NOT EXISTS (
      SELECT 1 FROM leases LEFT JOIN calls ON calls.call_id = leases.call_id
      WHERE leases.worker_id = workers.worker_id
        AND (leases.accepted_at IS NOT NULL OR coalesce(calls.queue_ms, 0) = 0)
  )
ORDER BY worker_id COLLATE "C";

-- name: evict_worker
-- Forgets a worker that is still silent and holds no lease, as silent_workers says.
-- parameters: worker_id text, ttl_ms bigint
-- returns: worker_id; no row: it was heard from, or got a call, meanwhile
DELETE FROM workers
WHERE worker_id = CAST(:worker_id AS text)
  AND heard_at <= now() - CAST(:ttl_ms AS bigint) * INTERVAL '1 millisecond'
  AND NOT EXISTS (
      SELECT 1 FROM leases LEFT JOIN calls ON calls.call_id = leases.call_id
      WHERE leases.worker_id = workers.worker_id
        AND (leases.accepted_at IS NOT NULL OR coalesce(calls.queue_ms, 0) = 0)
  )
RETURNING worker_id;

-- name: delete_old_payloads
-- Payloads are kept until an hour after their call's result was read, a day after its end at most.
-- parameters: read_ms bigint, unread_ms bigint
DELETE FROM call_payloads WHERE call_id IN (
    SELECT calls.call_id FROM call_payloads JOIN calls ON calls.call_id = call_payloads.call_id
    WHERE calls.read_at <= now() - CAST(:read_ms AS bigint) * INTERVAL '1 millisecond'
       OR calls.finished_at <= now() - CAST(:unread_ms AS bigint) * INTERVAL '1 millisecond'
);

-- name: delete_old_results
-- As delete_old_payloads.
-- parameters: read_ms bigint, unread_ms bigint
DELETE FROM call_results WHERE call_id IN (
    SELECT calls.call_id FROM call_results JOIN calls ON calls.call_id = call_results.call_id
    WHERE calls.read_at <= now() - CAST(:read_ms AS bigint) * INTERVAL '1 millisecond'
       OR calls.finished_at <= now() - CAST(:unread_ms AS bigint) * INTERVAL '1 millisecond'
);

-- name: delete_old_output
-- As delete_old_payloads.
-- parameters: read_ms bigint, unread_ms bigint
DELETE FROM call_output WHERE call_id IN (
    SELECT calls.call_id FROM call_output JOIN calls ON calls.call_id = call_output.call_id
    WHERE calls.read_at <= now() - CAST(:read_ms AS bigint) * INTERVAL '1 millisecond'
       OR calls.finished_at <= now() - CAST(:unread_ms AS bigint) * INTERVAL '1 millisecond'
);

-- name: delete_old_call_modules
-- What calls imported is kept as long as the calls.
-- parameters: kept_s bigint
DELETE FROM call_modules WHERE call_id IN (
    SELECT call_id FROM calls WHERE finished_at <= now() - CAST(:kept_s AS bigint) * INTERVAL '1 second'
);

-- name: delete_old_call_packages
-- As delete_old_calls: what a session's sandbox has installed is in them.
-- parameters: kept_s bigint
DELETE FROM call_packages WHERE call_id IN (
    SELECT call_id FROM calls
    WHERE finished_at <= now() - CAST(:kept_s AS bigint) * INTERVAL '1 second'
      AND NOT call_id IN (SELECT call_id FROM sessions)
);

-- name: delete_old_calls
-- Calls that ended some time ago, but for those whose sandboxes sessions still have: what a sandbox is, is in them.
-- parameters: kept_s bigint
DELETE FROM calls
WHERE finished_at <= now() - CAST(:kept_s AS bigint) * INTERVAL '1 second'
  AND NOT call_id IN (SELECT call_id FROM sessions);

-- name: delete_old_call_keys
-- Keys that calls came with some time ago.
-- parameters: kept_s bigint
DELETE FROM call_keys WHERE created_at <= now() - CAST(:kept_s AS bigint) * INTERVAL '1 second';

-- name: delete_old_cancellations
-- Orders that no worker came back for.
-- parameters: unread_ms bigint
DELETE FROM cancellations WHERE created_at <= now() - CAST(:unread_ms AS bigint) * INTERVAL '1 millisecond';

-- name: worker_rows
-- Workers with what is used by sandboxes and what leases without one reserve, by id; flavor and state null: any.
-- parameters: flavor text, state text, at_most integer, skip integer
WITH live AS (
    SELECT worker_id, sum(memory_bytes) AS memory_bytes, sum(gpu_memory_bytes) AS gpu_bytes, count(*) AS sandboxes
    FROM sandboxes
    GROUP BY worker_id
),
leased AS (
    SELECT
        leases.worker_id, count(*) AS calls,
        sum(CASE WHEN sandboxes.sandbox_id IS NULL THEN leases.memory_bytes ELSE 0 END) AS memory_bytes,
        sum(CASE WHEN sandboxes.sandbox_id IS NULL THEN leases.gpu_memory_bytes ELSE 0 END) AS gpu_bytes
    FROM leases
    LEFT JOIN sandboxes
        ON sandboxes.worker_id = leases.worker_id
       AND coalesce(sandboxes.session_id, sandboxes.placement_id) = coalesce(leases.session_id, leases.placement_id)
       AND (
           sandboxes.placement_id = leases.placement_id
           OR (sandboxes.session_id = leases.session_id AND (leases.continues OR leases.accepted_at IS NOT NULL))
       )
    GROUP BY leases.worker_id
)
SELECT
    workers.worker_id, workers.flavor, workers.state, workers.runtime, workers.python, workers.memory_total_bytes,
    workers.gpu_total_bytes, workers.max_sandboxes, workers.heard_at,
    coalesce(live.memory_bytes, 0) AS memory_used, coalesce(live.gpu_bytes, 0) AS gpu_used,
    coalesce(live.sandboxes, 0) AS sandboxes,
    coalesce(leased.memory_bytes, 0) AS memory_reserved, coalesce(leased.gpu_bytes, 0) AS gpu_reserved,
    coalesce(leased.calls, 0) AS in_flight
FROM workers
LEFT JOIN live ON live.worker_id = workers.worker_id
LEFT JOIN leased ON leased.worker_id = workers.worker_id
WHERE (CAST(:flavor AS text) IS NULL OR workers.flavor = CAST(:flavor AS text))
  AND (CAST(:state AS text) IS NULL OR workers.state = CAST(:state AS text))
ORDER BY workers.worker_id COLLATE "C"
LIMIT CAST(:at_most AS integer) OFFSET CAST(:skip AS integer);

-- name: generations_of_workers
-- What these workers hold.
-- parameters: worker_ids text[]
-- returns: worker_id, generation, restore_fixed_ns, cold_fixed_ns, checkpoint_id (null: it offers none of it)
SELECT
    worker_generations.worker_id, worker_generations.generation, worker_generations.restore_fixed_ns,
    worker_generations.cold_fixed_ns, worker_checkpoints.checkpoint_id
FROM worker_generations
LEFT JOIN worker_checkpoints
    ON worker_checkpoints.worker_id = worker_generations.worker_id
   AND worker_checkpoints.generation = worker_generations.generation
WHERE worker_generations.worker_id IN (SELECT unnest(CAST(:worker_ids AS text[])))
ORDER BY worker_generations.worker_id, worker_generations.generation, worker_checkpoints.checkpoint_id COLLATE "C";

-- name: call_rows
-- Calls, the latest first; state, function, worker_id (of the latest placement) and since (placed then or later) null:
-- any.
-- parameters: state text, function text, worker_id text, since timestamp with time zone
-- parameters: at_most integer, skip integer
SELECT
    call_id, state, function, created_at, finished_at, worker_id, checkpoint_id, generation, predicted_ready_ns,
    measured_ready_ns
FROM calls
WHERE (CAST(:state AS text) IS NULL OR state = CAST(:state AS text))
  AND (CAST(:function AS text) IS NULL OR function = CAST(:function AS text))
  AND (CAST(:worker_id AS text) IS NULL OR worker_id = CAST(:worker_id AS text))
  AND (CAST(:since AS timestamp with time zone) IS NULL OR created_at >= CAST(:since AS timestamp with time zone))
ORDER BY created_at DESC, call_id
LIMIT CAST(:at_most AS integer) OFFSET CAST(:skip AS integer);
