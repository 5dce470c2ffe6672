-- The page of a workflow's name gets an index; the page of all frameworks is merged from one page each, and needs none.
-- Declared input paths have an index each, which declare_input_path makes.
-- migrate:up

CREATE INDEX romancy_instances_by_name ON workflow_instances (framework, workflow_name, substr(started_at || '.000000', 1, 26), instance_id); -- list_instances by name
DROP INDEX romancy_instances_newest_any;

CREATE TABLE romancy_input_paths (
    path TEXT NOT NULL PRIMARY KEY,
    declared_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now'))
) WITHOUT ROWID;

-- migrate:down

DROP TABLE romancy_input_paths;
CREATE INDEX romancy_instances_newest_any ON workflow_instances (substr(started_at || '.000000', 1, 26), instance_id);
DROP INDEX romancy_instances_by_name;
