-- Workers that vanished while they ran an instance, and code that does not fit an instance's history.
-- migrate:up

-- How often in a row a worker vanished without a new step: `progress` is where the instance stood the last time.
CREATE TABLE romancy_setbacks (
    instance_id TEXT NOT NULL PRIMARY KEY,
    takeovers INTEGER NOT NULL,
    progress TEXT NOT NULL,
    refused_by TEXT,
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) WITHOUT ROWID;

-- migrate:down

DROP TABLE romancy_setbacks;
