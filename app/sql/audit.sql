-- The audit log: administrative requests.

-- name: insert_audit
-- An administrative request was answered now.
-- parameters: request_id text, address text, action text, target text, status integer
INSERT INTO audit (request_id, asked_at, address, action, target, status)
VALUES (
    CAST(:request_id AS text), now(), CAST(:address AS text), CAST(:action AS text), CAST(:target AS text),
    CAST(:status AS integer)
);

-- name: delete_old_audit
-- What was asked some time ago.
-- parameters: kept_days integer
DELETE FROM audit WHERE asked_at <= now() - CAST(:kept_days AS integer) * INTERVAL '1 day';
