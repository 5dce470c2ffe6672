-- What this library needs beyond the shared tables: columns with defaults, and tables of its own.
-- migrate:up

ALTER TABLE workflow_instances ADD COLUMN lock_token INTEGER NOT NULL DEFAULT 0;
ALTER TABLE workflow_instances ADD COLUMN runnable_since TEXT;
ALTER TABLE workflow_instances ADD COLUMN suspended_from TEXT;
ALTER TABLE workflow_instances ADD COLUMN parked_until TEXT;
ALTER TABLE workflow_instances ADD COLUMN parked_reason TEXT;
ALTER TABLE workflow_instances ADD COLUMN finished_at TEXT;

-- Which acquisition of the lock recorded a step: only that one may repeat it.
ALTER TABLE workflow_history ADD COLUMN lock_token INTEGER;

ALTER TABLE workflow_history_archive ADD COLUMN original_id INTEGER;

ALTER TABLE outbox_events ADD COLUMN lease_owner TEXT;
ALTER TABLE outbox_events ADD COLUMN lease_until TEXT;
ALTER TABLE outbox_events ADD COLUMN next_attempt_at TEXT;
ALTER TABLE outbox_events ADD COLUMN updated_at TEXT;

ALTER TABLE channel_messages ADD COLUMN origin TEXT;

-- One row per channel: publishers lock it until commit, so that ids become visible in order. A channel is unsettled
-- from a publish until a poll has seen that nobody waits for what it holds.
CREATE TABLE romancy_channels (
    channel TEXT NOT NULL PRIMARY KEY,
    unsettled_since TEXT
) WITHOUT ROWID;

-- Our receivers wait here and not in channel_subscriptions, where another framework would deliver to them.
CREATE TABLE romancy_channel_waits (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    instance_id TEXT NOT NULL,
    channel TEXT NOT NULL,
    activity_id TEXT NOT NULL,
    timeout_at TEXT,
    created_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f000', 'now')),
    CONSTRAINT romancy_one_channel_wait UNIQUE (instance_id, activity_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
);

-- Who waits for which instance to finish.
CREATE TABLE romancy_instance_waits (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    instance_id TEXT NOT NULL,
    activity_id TEXT NOT NULL,
    awaited_id TEXT NOT NULL,
    CONSTRAINT romancy_one_instance_wait UNIQUE (instance_id, activity_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
);

-- Messages of other frameworks that a broadcast subscriber has received: theirs may become visible out of order.
CREATE TABLE romancy_receipts (
    instance_id TEXT NOT NULL,
    message_id INTEGER NOT NULL,
    PRIMARY KEY (instance_id, message_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) WITHOUT ROWID;

-- How far the sweep over other frameworks' messages has come.
CREATE TABLE romancy_marks (
    name TEXT NOT NULL PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;

-- migrate:down

DROP TABLE romancy_marks;
DROP TABLE romancy_receipts;
DROP TABLE romancy_instance_waits;
DROP TABLE romancy_channel_waits;
DROP TABLE romancy_channels;
ALTER TABLE workflow_instances DROP COLUMN lock_token;
ALTER TABLE workflow_instances DROP COLUMN runnable_since;
ALTER TABLE workflow_instances DROP COLUMN suspended_from;
ALTER TABLE workflow_instances DROP COLUMN parked_until;
ALTER TABLE workflow_instances DROP COLUMN parked_reason;
ALTER TABLE workflow_instances DROP COLUMN finished_at;
ALTER TABLE workflow_history DROP COLUMN lock_token;
ALTER TABLE workflow_history_archive DROP COLUMN original_id;
ALTER TABLE outbox_events DROP COLUMN lease_owner;
ALTER TABLE outbox_events DROP COLUMN lease_until;
ALTER TABLE outbox_events DROP COLUMN next_attempt_at;
ALTER TABLE outbox_events DROP COLUMN updated_at;
ALTER TABLE channel_messages DROP COLUMN origin;
