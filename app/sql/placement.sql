-- Worker first, checkpoint second, lease last: all in the transaction of app/placement.py's place_calls.

-- name: rank_workers
-- The best worker for a call, and how many workers each filter leaves out. No row: no worker is ready.
-- A call without gpu_bytes that is a GPU call takes the whole GPU memory. The lists are one value a call that this
-- transaction has placed and not written yet: its worker, and what it reserves there (of sandboxes: 1 or 0).
-- parameters: gpu boolean, memory_bytes bigint, gpu_bytes bigint, headroom_ppm bigint, ttl_ms bigint
-- parameters: before_worker_ids text[], before_memory_bytes bigint[], before_gpu_memory_bytes bigint[]
-- parameters: before_sandboxes integer[]
-- returns: worker_id, flavor, markers, base_bytes, gpu_total_bytes, fits, and counts of workers: ready, other_flavor,
-- short_of_memory, short_of_gpu, full
WITH held AS (
    SELECT worker_id, memory_bytes, gpu_memory_bytes, 1 AS sandboxes, 0 AS calls FROM sandboxes WHERE NOT kept
    UNION ALL
    -- A sandbox's report names its placement: from then on the sandbox counts, not the lease. A session's sandbox names
    -- its session, and counts for whatever call it gets; not yet for one that is to begin the session anew.
    SELECT
        leases.worker_id,
        CASE WHEN sandboxes.sandbox_id IS NULL THEN leases.memory_bytes ELSE 0 END,
        CASE WHEN sandboxes.sandbox_id IS NULL THEN leases.gpu_memory_bytes ELSE 0 END,
        CASE WHEN sandboxes.sandbox_id IS NULL THEN 1 ELSE 0 END,
        1
    FROM leases
    LEFT JOIN sandboxes
        ON sandboxes.worker_id = leases.worker_id
       AND coalesce(sandboxes.session_id, sandboxes.placement_id) = coalesce(leases.session_id, leases.placement_id)
       AND (
           sandboxes.placement_id = leases.placement_id
           OR (sandboxes.session_id = leases.session_id AND (leases.continues OR leases.accepted_at IS NOT NULL))
       )
    UNION ALL
    SELECT
        unnest(CAST(:before_worker_ids AS text[])), unnest(CAST(:before_memory_bytes AS bigint[])),
        unnest(CAST(:before_gpu_memory_bytes AS bigint[])), unnest(CAST(:before_sandboxes AS integer[])), 1
),
taken AS (
    SELECT
        worker_id,
        -- sums have no bound: what is more than any total is as good as this
        CAST(least(sum(memory_bytes), 4611686018427387903) AS bigint) AS memory_bytes,
        sum(gpu_memory_bytes) AS gpu_bytes, sum(sandboxes) AS sandboxes, sum(calls) AS calls
    FROM held
    GROUP BY worker_id
),
loads AS (
    SELECT
        workers.worker_id, workers.flavor, workers.max_sandboxes,
        workers.memory_total_bytes AS memory_total,
        workers.kept_memory_bytes + coalesce(taken.memory_bytes, 0) AS memory_taken,
        -- wide enough for any sum and for the products below
        CAST(workers.gpu_total_bytes AS decimal(38, 0)) AS gpu_total,
        CAST(workers.kept_gpu_memory_bytes + coalesce(taken.gpu_bytes, 0) AS decimal(38, 0)) AS gpu_taken,
        workers.kept_sandboxes + coalesce(taken.sandboxes, 0) AS sandboxes,
        coalesce(taken.calls, 0) AS in_flight
    FROM workers
    LEFT JOIN taken ON taken.worker_id = workers.worker_id
    WHERE workers.state = 'ready'
      AND workers.heard_at > now() - CAST(:ttl_ms AS bigint) * INTERVAL '1 millisecond'
),
-- Materialised, so that each worker's arithmetic is done once; in 64 bits where that is enough, for speed.
checked AS MATERIALIZED (
    SELECT
        worker_id, flavor, in_flight,
        -- per million of the total, rounded down; an unknown total counts as nothing taken
        CASE
            WHEN memory_total IS NULL THEN 0
            WHEN memory_total < 8000000000000 AND memory_taken < 8000000000000
                THEN CAST((memory_taken * 1000000 - (memory_taken * 1000000) % memory_total) / memory_total AS bigint)
            ELSE CAST(
                (CAST(memory_taken AS decimal(38, 0)) * 1000000
                    - (CAST(memory_taken AS decimal(38, 0)) * 1000000) % CAST(memory_total AS decimal(38, 0)))
                / CAST(memory_total AS decimal(38, 0)) AS decimal(38, 0)
            )
        END AS per_million,
        NOT CAST(:gpu AS boolean) OR flavor = 'gpu' AS flavor_fits,
        -- the capacity rule, in integers; where no total is reported it is no filter
        CASE
            WHEN memory_total IS NULL THEN TRUE
            WHEN memory_total < 8000000000000 AND memory_taken < 4000000000000
                AND CAST(:memory_bytes AS bigint) < 4000000000000
                THEN (memory_taken + CAST(:memory_bytes AS bigint)) * 1000000
                    <= memory_total * CAST(:headroom_ppm AS bigint)
            ELSE (CAST(memory_taken AS decimal(38, 0)) + CAST(:memory_bytes AS bigint)) * 1000000
                <= CAST(memory_total AS decimal(38, 0)) * CAST(:headroom_ppm AS bigint)
        END AS memory_fits,
        CASE
            WHEN NOT CAST(:gpu AS boolean) OR gpu_total IS NULL THEN TRUE
            WHEN CAST(:gpu_bytes AS bigint) IS NULL THEN gpu_taken = 0
            ELSE (gpu_taken + CAST(:gpu_bytes AS bigint)) * 1000000 <= gpu_total * CAST(:headroom_ppm AS bigint)
        END AS gpu_fits,
        max_sandboxes = 0 OR sandboxes < max_sandboxes AS sandboxes_fit
    FROM loads
),
counts AS (
    SELECT
        count(*) AS ready,
        count(*) FILTER (WHERE NOT flavor_fits) AS other_flavor,
        count(*) FILTER (WHERE flavor_fits AND NOT memory_fits) AS short_of_memory,
        count(*) FILTER (WHERE flavor_fits AND NOT gpu_fits) AS short_of_gpu,
        count(*) FILTER (WHERE flavor_fits AND NOT sandboxes_fit) AS "full"
    FROM checked
),
best AS (
    SELECT worker_id, flavor_fits AND memory_fits AND gpu_fits AND sandboxes_fit AS fits
    FROM checked
    ORDER BY
        CASE WHEN flavor_fits AND memory_fits AND gpu_fits AND sandboxes_fit THEN 0 ELSE 1 END,
        -- a cpu call spills to a gpu worker only when no cpu worker can take it
        CASE WHEN flavor = 'gpu' AND NOT CAST(:gpu AS boolean) THEN 1 ELSE 0 END,
        per_million,
        in_flight,
        worker_id COLLATE "C"
    LIMIT 1
)
SELECT
    best.*, counts.*, workers.flavor, workers.markers, workers.base_bytes, workers.gpu_total_bytes
FROM best
CROSS JOIN counts
JOIN workers ON workers.worker_id = best.worker_id;

-- name: insert_calls
-- Calls with their first placements; each parameter is a list with one value a call, as in all inserts that follow.
-- parameters: call_id text[], function text[], python text[], gpu boolean[], memory_bytes bigint[]
-- parameters: max_memory_bytes bigint[], gpu_memory_bytes bigint[], max_gpu_memory_bytes bigint[], session_id text[]
-- parameters: pinned_checkpoint_id text[], cold boolean[], retry boolean[], timeout_ms bigint[], placement_id text[]
-- parameters: worker_id text[], worker_flavor text[], catalogue_id integer[], generation text[], checkpoint_id text[]
-- parameters: checkpoint_flavor text[], cost_ns bigint[], cold_cost_ns bigint[], predicted_ready_ns bigint[]
-- parameters: reason text[], continues boolean[], queue_ms bigint[]
INSERT INTO calls (
    call_id, state, function, python, gpu, memory_bytes, max_memory_bytes, gpu_memory_bytes, max_gpu_memory_bytes,
    session_id, pinned_checkpoint_id, cold, retry, timeout_ms, attempts,
    placement_id, worker_id, worker_flavor, catalogue_id, generation, checkpoint_id, checkpoint_flavor,
    cost_ns, cold_cost_ns, predicted_ready_ns, reason, continues, queue_ms, created_at
)
SELECT
    unnest(CAST(:call_id AS text[])), 'placed', unnest(CAST(:function AS text[])), unnest(CAST(:python AS text[])),
    unnest(CAST(:gpu AS boolean[])), unnest(CAST(:memory_bytes AS bigint[])),
    unnest(CAST(:max_memory_bytes AS bigint[])), unnest(CAST(:gpu_memory_bytes AS bigint[])),
    unnest(CAST(:max_gpu_memory_bytes AS bigint[])), unnest(CAST(:session_id AS text[])),
    unnest(CAST(:pinned_checkpoint_id AS text[])), unnest(CAST(:cold AS boolean[])),
    unnest(CAST(:retry AS boolean[])), unnest(CAST(:timeout_ms AS bigint[])), 1,
    unnest(CAST(:placement_id AS text[])), unnest(CAST(:worker_id AS text[])),
    unnest(CAST(:worker_flavor AS text[])), unnest(CAST(:catalogue_id AS integer[])),
    unnest(CAST(:generation AS text[])), unnest(CAST(:checkpoint_id AS text[])),
    unnest(CAST(:checkpoint_flavor AS text[])), unnest(CAST(:cost_ns AS bigint[])),
    unnest(CAST(:cold_cost_ns AS bigint[])), unnest(CAST(:predicted_ready_ns AS bigint[])),
    unnest(CAST(:reason AS text[])), unnest(CAST(:continues AS boolean[])), unnest(CAST(:queue_ms AS bigint[])), now();

-- name: answers_to_keys
-- What was answered to calls that came with these keys.
-- parameters: call_keys text[]
-- returns: call_key, request_sha256, answer
SELECT call_key, request_sha256, answer FROM call_keys
WHERE call_key IN (SELECT unnest(CAST(:call_keys AS text[])));

-- name: insert_call_keys
-- Keys that calls came with, and what was answered.
-- parameters: call_key text[], call_id text[], request_sha256 text[], answer bytea[]
INSERT INTO call_keys (call_key, call_id, request_sha256, answer, created_at)
SELECT
    unnest(CAST(:call_key AS text[])), unnest(CAST(:call_id AS text[])), unnest(CAST(:request_sha256 AS text[])),
    unnest(CAST(:answer AS bytea[])), now();

-- name: insert_payloads
-- The functions and their arguments, opaque.
-- parameters: call_id text[], payload bytea[]
INSERT INTO call_payloads (call_id, payload)
SELECT unnest(CAST(:call_id AS text[])), unnest(CAST(:payload AS bytea[]));

-- name: insert_call_modules
-- What calls said they import, in their order, and the items that it stands for; one value a module.
-- parameters: call_id text[], position integer[], module text[], item text[]
INSERT INTO call_modules (call_id, position, module, item)
SELECT
    unnest(CAST(:call_id AS text[])), unnest(CAST(:position AS integer[])), unnest(CAST(:module AS text[])),
    unnest(CAST(:item AS text[]));

-- name: insert_call_packages
-- What became of calls' requirements; one value a requirement.
-- parameters: call_id text[], position integer[], requirement text[], skipped boolean[], installed text[]
-- parameters: reason text[]
INSERT INTO call_packages (call_id, position, requirement, skipped, installed, reason)
SELECT
    unnest(CAST(:call_id AS text[])), unnest(CAST(:position AS integer[])), unnest(CAST(:requirement AS text[])),
    unnest(CAST(:skipped AS boolean[])), unnest(CAST(:installed AS text[])), unnest(CAST(:reason AS text[]));

-- name: insert_leases
-- What placements reserve on their workers, until they are accepted in time or end.
-- parameters: placement_id text[], call_id text[], worker_id text[], worker_flavor text[], generation text[]
-- parameters: checkpoint_id text[], checkpoint_flavor text[], gpu boolean[], memory_bytes bigint[]
-- parameters: reserved_gpu_memory_bytes bigint[], session_id text[], continues boolean[], accept_ms bigint[]
INSERT INTO leases (
    placement_id, call_id, worker_id, worker_flavor, generation, checkpoint_id, checkpoint_flavor,
    gpu, memory_bytes, gpu_memory_bytes, session_id, continues, placed_at, deadline_at
)
SELECT
    unnest(CAST(:placement_id AS text[])), unnest(CAST(:call_id AS text[])), unnest(CAST(:worker_id AS text[])),
    unnest(CAST(:worker_flavor AS text[])), unnest(CAST(:generation AS text[])),
    unnest(CAST(:checkpoint_id AS text[])), unnest(CAST(:checkpoint_flavor AS text[])),
    unnest(CAST(:gpu AS boolean[])), unnest(CAST(:memory_bytes AS bigint[])),
    unnest(CAST(:reserved_gpu_memory_bytes AS bigint[])), unnest(CAST(:session_id AS text[])),
    unnest(CAST(:continues AS boolean[])), now(), now() + unnest(CAST(:accept_ms AS bigint[])) * INTERVAL '1 millisecond';

-- name: call_to_place
-- What a call asks for, as it was sent.
-- parameters: call_id text
-- returns: one row, the request's columns of calls, and attempts
SELECT
    call_id, gpu, memory_bytes, max_memory_bytes, gpu_memory_bytes, max_gpu_memory_bytes, pinned_checkpoint_id,
    cold, retry, attempts, session_id, continues
FROM calls
WHERE call_id = CAST(:call_id AS text);

-- name: modules_of_call
-- The modules of a call, in its order.
-- parameters: call_id text
SELECT module FROM call_modules WHERE call_id = CAST(:call_id AS text) ORDER BY position;

-- name: requirements_of_call
-- The requirements of a call, in its order.
-- parameters: call_id text
SELECT requirement FROM call_packages WHERE call_id = CAST(:call_id AS text) ORDER BY position;

-- name: delete_call_packages
-- Forgets what became of a call's requirements: another worker may have another root filesystem.
-- parameters: call_id text
DELETE FROM call_packages WHERE call_id = CAST(:call_id AS text);

-- name: place_call_again
-- The next placement of a call whose last one ended before it ran, or that may run twice.
-- parameters: call_id text, placement_id text, worker_id text, worker_flavor text, catalogue_id integer
-- parameters: generation text, checkpoint_id text, checkpoint_flavor text, cost_ns bigint, cold_cost_ns bigint
-- parameters: predicted_ready_ns bigint, reason text
UPDATE calls SET
    state = 'placed', accepted_at = NULL, attempts = attempts + 1,
    placement_id = CAST(:placement_id AS text), worker_id = CAST(:worker_id AS text),
    worker_flavor = CAST(:worker_flavor AS text), catalogue_id = CAST(:catalogue_id AS integer),
    generation = CAST(:generation AS text), checkpoint_id = CAST(:checkpoint_id AS text),
    checkpoint_flavor = CAST(:checkpoint_flavor AS text),
    cost_ns = CAST(:cost_ns AS bigint), cold_cost_ns = CAST(:cold_cost_ns AS bigint),
    predicted_ready_ns = CAST(:predicted_ready_ns AS bigint), reason = CAST(:reason AS text)
WHERE call_id = CAST(:call_id AS text);
