-- Catalogues: which are there, which is active, what is in one. Their rows are written by bulk loads (app/catalogue.py);
-- closures are computed outside SQL, once, at import.

-- name: find_catalogue
-- The catalogue whose document has this SHA-256.
-- parameters: sha256 text
-- returns: at most one row
SELECT catalogue_id, sha256, generation, flavor, alpha
FROM catalogues
WHERE sha256 = CAST(:sha256 AS text);

-- name: next_catalogue_id
-- The number of the next catalogue. Numbers grow with each import: the newest is never pruned.
-- parameters: none
-- returns: one number
SELECT coalesce(max(catalogue_id), 0) + 1
FROM catalogues;

-- name: activate_catalogue
-- Makes a catalogue the active one of its flavor.
-- parameters: catalogue_id integer, activated_by text, file_sha256 text
-- file_sha256 is the file's in CATALOGUE_DIR as it was just looked at; null: nobody looked, what was known stays.
INSERT INTO active_catalogues (flavor, catalogue_id, activated_by, file_sha256, activated_at)
SELECT flavor, catalogue_id, CAST(:activated_by AS text), CAST(:file_sha256 AS text), now()
FROM catalogues
WHERE catalogue_id = CAST(:catalogue_id AS integer)
ON CONFLICT (flavor) DO UPDATE SET
    catalogue_id = excluded.catalogue_id,
    activated_by = excluded.activated_by,
    file_sha256 = coalesce(excluded.file_sha256, active_catalogues.file_sha256),
    activated_at = excluded.activated_at;

-- name: deactivate_flavor
-- Leaves a flavor without an active catalogue: its calls start cold.
-- parameters: flavor text
DELETE FROM active_catalogues
WHERE flavor = CAST(:flavor AS text);

-- name: list_active_catalogues
-- What is active for which flavor, and why.
-- parameters: none
-- returns: at most one row a flavor
SELECT a.flavor, a.catalogue_id, a.activated_by, a.file_sha256, c.sha256
FROM active_catalogues a
JOIN catalogues c ON c.catalogue_id = a.catalogue_id;

-- name: find_active_catalogue
-- The active catalogue of a flavor.
-- parameters: flavor text
-- returns: at most one row
SELECT c.catalogue_id, c.sha256, c.generation, c.flavor, c.alpha
FROM active_catalogues a
JOIN catalogues c ON c.catalogue_id = a.catalogue_id
WHERE a.flavor = CAST(:flavor AS text);

-- name: list_catalogues
-- All catalogues, or those of one flavor, the active one of each flavor first, then the newest.
-- parameters: flavor text
SELECT
    c.catalogue_id, c.sha256, c.generation, c.flavor, c.alpha, a.flavor IS NOT NULL AS active, c.imported_at,
    c.item_count, c.checkpoint_count, c.distribution_count
FROM catalogues c
LEFT JOIN active_catalogues a ON a.catalogue_id = c.catalogue_id
WHERE CAST(:flavor AS text) IS NULL OR c.flavor = CAST(:flavor AS text)
ORDER BY c.flavor COLLATE "C", a.flavor IS NULL, c.catalogue_id DESC;

-- name: list_prunable_catalogues
-- Catalogues that nothing needs: not active, none of the last two of their flavor, their generation held by no worker.
-- parameters: none
WITH earlier AS (
    SELECT
        c.catalogue_id, c.generation,
        row_number() OVER (PARTITION BY c.flavor ORDER BY c.catalogue_id DESC) AS place
    FROM catalogues c
    WHERE NOT EXISTS (SELECT 1 FROM active_catalogues a WHERE a.catalogue_id = c.catalogue_id)
)
SELECT e.catalogue_id
FROM earlier e
WHERE e.place > 2 AND NOT EXISTS (SELECT 1 FROM worker_generations g WHERE g.generation = e.generation)
ORDER BY e.catalogue_id;

-- name: find_catalogue_for_worker
-- The catalogue that prices calls on a worker: its flavor's active one if the worker holds that generation, else the
-- newest imported one whose generation it holds.
-- parameters: worker_id text
-- returns: at most one row; none: calls on it start cold
SELECT c.catalogue_id, c.sha256, c.generation, c.flavor, c.alpha, g.restore_fixed_ns, g.cold_fixed_ns
FROM workers w
JOIN catalogues c ON c.flavor = w.flavor
JOIN worker_generations g ON g.worker_id = w.worker_id AND g.generation = c.generation
LEFT JOIN active_catalogues a ON a.catalogue_id = c.catalogue_id
WHERE w.worker_id = CAST(:worker_id AS text)
ORDER BY a.flavor IS NULL, c.catalogue_id DESC
LIMIT 1;

-- name: held_checkpoints
-- The checkpoints of a generation that a worker offers.
-- parameters: worker_id text, generation text
-- returns: checkpoint_id
SELECT checkpoint_id FROM worker_checkpoints
WHERE worker_id = CAST(:worker_id AS text) AND generation = CAST(:generation AS text);

-- name: list_distributions
-- The root filesystem's distributions, all or those of these canonical names.
-- parameters: catalogue_id integer, names text[]
SELECT name, version
FROM distributions
WHERE catalogue_id = CAST(:catalogue_id AS integer)
    AND (CAST(:names AS text[]) IS NULL OR name = ANY(CAST(:names AS text[])))
ORDER BY name COLLATE "C";

-- name: list_checkpoints
-- The checkpoints of a catalogue in the document's order, all or the one of this id.
-- parameters: catalogue_id integer, checkpoint_id text
SELECT ordinal, checkpoint_id, size_mb, size_bytes, size_ns
FROM checkpoints
WHERE catalogue_id = CAST(:catalogue_id AS integer)
    AND (CAST(:checkpoint_id AS text) IS NULL OR checkpoint_id = CAST(:checkpoint_id AS text))
ORDER BY ordinal;

-- name: list_checkpoint_items
-- What a checkpoint holds, and which of it the executor was told to import.
-- parameters: catalogue_id integer, ordinal integer
WITH held AS MATERIALIZED (
    SELECT bits
    FROM contents
    WHERE catalogue_id = CAST(:catalogue_id AS integer) AND ordinal = CAST(:ordinal AS integer)
)
SELECT i.key, i.load_ns, i.size_mb, c.item_id IS NOT NULL AS canonical
FROM held h
JOIN items i ON get_bit(h.bits, i.atom_id) = 1
LEFT JOIN canonical_items c
    ON c.catalogue_id = i.catalogue_id AND c.ordinal = CAST(:ordinal AS integer) AND c.item_id = i.item_id
WHERE i.catalogue_id = CAST(:catalogue_id AS integer)
ORDER BY i.key COLLATE "C";

-- name: find_item
-- One item by its key.
-- parameters: catalogue_id integer, key text
SELECT item_id, key, load_ns, size_mb, resource_type, distribution
FROM items
WHERE catalogue_id = CAST(:catalogue_id AS integer) AND key = CAST(:key AS text);

-- name: list_closure_items
-- The closure of an item: all that is needed to import it, itself included.
-- parameters: catalogue_id integer, key text
SELECT i.key, i.load_ns, i.size_mb
FROM items asked
JOIN closures c ON c.catalogue_id = asked.catalogue_id AND c.closure_id = asked.closure_id
CROSS JOIN items i
WHERE asked.catalogue_id = CAST(:catalogue_id AS integer) AND asked.key = CAST(:key AS text)
    AND i.catalogue_id = CAST(:catalogue_id AS integer) AND get_bit(c.bits, i.atom_id) = 1
ORDER BY i.key COLLATE "C";
