-- Whose lock has expired is found among what is locked, no longer among all that is unfinished. Heartbeats change no
-- column of the index.
-- migrate:up

ALTER TABLE workflow_instances
    ADD INDEX romancy_instances_held (framework, locked_by); -- cleanup_stale_locks

-- migrate:down

ALTER TABLE workflow_instances
    DROP INDEX romancy_instances_held;
