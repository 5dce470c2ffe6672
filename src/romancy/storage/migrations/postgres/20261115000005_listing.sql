-- The page of a workflow's name gets an index; the page of all frameworks is merged from one page each, and needs none.
-- Declared input paths have an index each, which declare_input_path makes.
-- migrate:up transaction:false

CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_by_name ON workflow_instances (framework, workflow_name, started_at, instance_id COLLATE "C"); -- list_instances by name
DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_newest_any;

CREATE TABLE IF NOT EXISTS romancy_input_paths (
    path VARCHAR(255) COLLATE {collation} NOT NULL PRIMARY KEY,
    declared_at TIMESTAMP(6) NOT NULL DEFAULT timezone('UTC', clock_timestamp())
);

-- migrate:down transaction:false

DROP TABLE IF EXISTS romancy_input_paths;
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_newest_any ON workflow_instances (started_at, instance_id COLLATE "C");
DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_by_name;
