-- Ready questions for people: the dashboard offers them. Each is one SELECT over the views of docs/sql.md.

-- name: question_costly_packages
-- Which packages cost most?
-- parameters: none
SELECT distribution, version, items, load_s, size_mb, checkpoints
FROM package_costs
ORDER BY load_ns DESC
LIMIT 20;

-- name: question_costly_items
-- Which imports cost most, with all that they need?
-- parameters: none
SELECT item, distribution, closure_items, closure_load_s, closure_size_mb, checkpoints
FROM item_costs
ORDER BY closure_load_ns DESC, item COLLATE "C"
LIMIT 20;

-- name: question_checkpoints
-- What does each checkpoint hold, and what is that worth?
-- parameters: none
SELECT flavor, checkpoint_id, items, distributions, size_mb, size_s, load_s, saves_at_most_s
FROM checkpoint_costs
ORDER BY flavor, ordinal;

-- name: question_savings
-- What did each checkpoint save the recorded calls?
-- parameters: none
SELECT flavor, checkpoint_id, calls, import_sets, saved_s, with_all_s, without_s, with_none_s
FROM checkpoint_savings
ORDER BY flavor, ordinal;

-- name: question_users
-- For whom is each checkpoint?
-- parameters: none
SELECT flavor, checkpoint_id, function, calls, saved_s, last_call_at
FROM checkpoint_users
ORDER BY calls DESC, function COLLATE "C"
LIMIT 50;

-- name: question_unheld
-- Which items are in no checkpoint though calls need them?
-- parameters: none
SELECT item, distribution, asked_calls, needed_calls, load_s, spent_s
FROM unheld_requests
ORDER BY spent_ns DESC, item COLLATE "C"
LIMIT 20;

-- name: question_drift
-- Do starts take as long as predicted?
-- parameters: none
SELECT flavor, checkpoint_id, started, calls, predicted_s, measured_s, drift_s, fastest_s, slowest_s
FROM start_drift
ORDER BY calls DESC
LIMIT 50;

-- name: question_slow_starts
-- Which calls started slowest?
-- parameters: none
SELECT call_id, function, worker_id, checkpoint_id, started, predicted_ready_s, measured_ready_s, created_at
FROM recorded_calls
WHERE measured_ready_ns IS NOT NULL
ORDER BY measured_ready_ns DESC
LIMIT 20;

-- name: question_audit
-- Who administered what?
-- parameters: none
SELECT asked_at, address, action, target, status
FROM audit_log
ORDER BY asked_at DESC
LIMIT 50;
