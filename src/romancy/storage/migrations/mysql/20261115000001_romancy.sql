-- What this library needs beyond the shared tables: columns with defaults, and tables of its own.
-- migrate:up

-- One ALTER per table: each waits until nobody uses the table, and a transaction that comes in between may be the victim.
ALTER TABLE workflow_instances
    ADD COLUMN lock_token BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN runnable_since DATETIME(6),
    ADD COLUMN suspended_from VARCHAR(100),
    ADD COLUMN parked_until DATETIME(6),
    ADD COLUMN parked_reason LONGTEXT,
    ADD COLUMN finished_at DATETIME(6);

-- Which acquisition of the lock recorded a step: only that one may repeat it.
ALTER TABLE workflow_history
    ADD COLUMN lock_token BIGINT;

ALTER TABLE workflow_history_archive
    ADD COLUMN original_id BIGINT;

-- sequence is the order of insertion, where created_at ties.
ALTER TABLE outbox_events
    ADD COLUMN lease_owner VARCHAR(255),
    ADD COLUMN lease_until DATETIME(6),
    ADD COLUMN next_attempt_at DATETIME(6),
    ADD COLUMN updated_at DATETIME(6),
    ADD COLUMN sequence BIGINT NOT NULL AUTO_INCREMENT UNIQUE;

ALTER TABLE channel_messages
    ADD COLUMN origin VARCHAR(100);

-- One row per channel: publishers lock it until commit, so that ids become visible in order. A channel is unsettled
-- from a publish until a poll has seen that nobody waits for what it holds.
CREATE TABLE romancy_channels (
    channel VARCHAR(255) NOT NULL PRIMARY KEY,
    unsettled_since DATETIME(6)
) ENGINE=InnoDB COLLATE={collation};

-- Our receivers wait here and not in channel_subscriptions, where another framework would deliver to them.
CREATE TABLE romancy_channel_waits (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    channel VARCHAR(255) NOT NULL,
    activity_id VARCHAR(255) NOT NULL,
    timeout_at DATETIME(6),
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    CONSTRAINT romancy_one_channel_wait UNIQUE (instance_id, activity_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

-- Who waits for which instance to finish.
CREATE TABLE romancy_instance_waits (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    activity_id VARCHAR(255) NOT NULL,
    awaited_id VARCHAR(255) NOT NULL,
    CONSTRAINT romancy_one_instance_wait UNIQUE (instance_id, activity_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

-- Messages of other frameworks that a broadcast subscriber has received: theirs may become visible out of order.
CREATE TABLE romancy_receipts (
    instance_id VARCHAR(255) NOT NULL,
    message_id BIGINT NOT NULL,
    PRIMARY KEY (instance_id, message_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

-- How far the sweep over other frameworks' messages has come.
CREATE TABLE romancy_marks (
    name VARCHAR(255) NOT NULL PRIMARY KEY,
    value BIGINT NOT NULL
) ENGINE=InnoDB COLLATE={collation};

-- migrate:down

DROP TABLE IF EXISTS romancy_marks;
DROP TABLE IF EXISTS romancy_receipts;
DROP TABLE IF EXISTS romancy_instance_waits;
DROP TABLE IF EXISTS romancy_channel_waits;
DROP TABLE IF EXISTS romancy_channels;
ALTER TABLE workflow_instances
    DROP COLUMN lock_token,
    DROP COLUMN runnable_since,
    DROP COLUMN suspended_from,
    DROP COLUMN parked_until,
    DROP COLUMN parked_reason,
    DROP COLUMN finished_at;
ALTER TABLE workflow_history
    DROP COLUMN lock_token;
ALTER TABLE workflow_history_archive
    DROP COLUMN original_id;
ALTER TABLE outbox_events
    DROP COLUMN lease_owner,
    DROP COLUMN lease_until,
    DROP COLUMN next_attempt_at,
    DROP COLUMN updated_at,
    DROP COLUMN sequence;
ALTER TABLE channel_messages
    DROP COLUMN origin;
