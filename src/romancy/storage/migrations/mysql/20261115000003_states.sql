-- What instances show of themselves, and which events have come in before.
-- migrate:up

CREATE TABLE romancy_states (
    instance_id VARCHAR(255) NOT NULL PRIMARY KEY,
    state LONGTEXT NOT NULL,
    updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

-- The keys of events that publish_once has published; a repetition of one is not published again.
CREATE TABLE romancy_seen_events (
    event_key VARCHAR(255) NOT NULL PRIMARY KEY,
    seen_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    INDEX romancy_seen_events_age (seen_at) -- cleanup_seen_events
) ENGINE=InnoDB COLLATE={collation};

-- migrate:down

DROP TABLE IF EXISTS romancy_seen_events;
DROP TABLE IF EXISTS romancy_states;
