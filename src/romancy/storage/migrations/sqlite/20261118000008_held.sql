-- Whose lock has expired is found among what is locked, no longer among all that is unfinished. Heartbeats change no
-- column of the index.
-- migrate:up

CREATE INDEX romancy_instances_held ON workflow_instances (framework) WHERE locked_by <> ''; -- cleanup_stale_locks

-- migrate:down

DROP INDEX romancy_instances_held;
