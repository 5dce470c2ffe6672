-- The page of a workflow's name gets an index; the page of all frameworks is merged from one page each, and needs none.
-- Declared input paths have an index each, which declare_input_path makes.
-- migrate:up

ALTER TABLE workflow_instances
    ADD INDEX romancy_instances_by_name (framework, workflow_name, started_at, instance_id), -- list_instances by name
    DROP INDEX romancy_instances_newest_any;

CREATE TABLE IF NOT EXISTS romancy_input_paths (
    path VARCHAR(255) NOT NULL PRIMARY KEY,
    declared_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))
) ENGINE=InnoDB COLLATE={collation};

-- migrate:down

DROP TABLE IF EXISTS romancy_input_paths;
ALTER TABLE workflow_instances
    ADD INDEX romancy_instances_newest_any (started_at, instance_id),
    DROP INDEX romancy_instances_by_name;
