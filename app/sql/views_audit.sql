-- SQL for people, fourth part: who administered what.

-- Administrative requests of the last 90 days, refused ones too: when they were answered, from which address, the
-- operation and its path, and the status of the answer. request_id is the client's word: it may come more than once.
CREATE VIEW audit_log AS
SELECT split_part(request_id, '~', 1) AS request_id, asked_at, address, action, target, status
FROM audit;
