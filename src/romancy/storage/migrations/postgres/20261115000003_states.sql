-- What instances show of themselves, and which events have come in before.
-- migrate:up

CREATE TABLE romancy_states (
    instance_id VARCHAR(255) COLLATE {collation} NOT NULL PRIMARY KEY,
    state TEXT NOT NULL,
    updated_at TIMESTAMP(6) NOT NULL DEFAULT timezone('UTC', clock_timestamp()),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
);

-- The keys of events that publish_once has published; a repetition of one is not published again.
CREATE TABLE romancy_seen_events (
    event_key VARCHAR(255) COLLATE {collation} NOT NULL PRIMARY KEY,
    seen_at TIMESTAMP(6) NOT NULL DEFAULT timezone('UTC', clock_timestamp())
);

CREATE INDEX romancy_seen_events_age ON romancy_seen_events (seen_at); -- cleanup_seen_events

-- migrate:down

DROP TABLE romancy_seen_events;
DROP TABLE romancy_states;
