-- What instances show of themselves, and which events have come in before.
-- migrate:up

CREATE TABLE romancy_states (
    instance_id TEXT NOT NULL PRIMARY KEY,
    state TEXT NOT NULL,
    updated_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
);

-- The keys of events that publish_once has published; a repetition of one is not published again.
CREATE TABLE romancy_seen_events (
    event_key TEXT NOT NULL PRIMARY KEY,
    seen_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now'))
) WITHOUT ROWID;

CREATE INDEX romancy_seen_events_age ON romancy_seen_events (seen_at); -- cleanup_seen_events

-- migrate:down

DROP TABLE romancy_seen_events;
DROP TABLE romancy_states;
