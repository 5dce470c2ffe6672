-- The tables shared with Edda and Romancy, in their best form: 64-bit ids, exact times, keys compared byte for byte.
-- Recorded under the version that all three frameworks know; skipped where the tables exist already.
-- migrate:up

CREATE TABLE IF NOT EXISTS schema_version (
    version INT PRIMARY KEY,
    applied_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    description LONGTEXT NOT NULL
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS workflow_definitions (
    workflow_name VARCHAR(255) NOT NULL,
    source_hash VARCHAR(64) NOT NULL,
    source_code LONGTEXT NOT NULL,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (workflow_name, source_hash)
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS workflow_instances (
    instance_id VARCHAR(255) NOT NULL PRIMARY KEY,
    workflow_name VARCHAR(255) NOT NULL,
    source_hash VARCHAR(64) NOT NULL,
    owner_service VARCHAR(255) NOT NULL,
    framework VARCHAR(100) NOT NULL DEFAULT 'python',
    status VARCHAR(100) NOT NULL DEFAULT 'running',
    current_activity_id VARCHAR(255),
    continued_from VARCHAR(255),
    started_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    input_data LONGTEXT NOT NULL,
    output_data LONGTEXT,
    locked_by VARCHAR(255),
    locked_at DATETIME(6),
    lock_timeout_seconds INT,
    lock_expires_at DATETIME(6),
    CONSTRAINT valid_status CHECK (status IN (
        'running', 'completed', 'failed', 'waiting_for_event', 'waiting_for_timer', 'waiting_for_message',
        'compensating', 'cancelled', 'recurred')),
    FOREIGN KEY (continued_from) REFERENCES workflow_instances (instance_id),
    FOREIGN KEY (workflow_name, source_hash) REFERENCES workflow_definitions (workflow_name, source_hash)
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS workflow_history (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    activity_id VARCHAR(255) NOT NULL,
    event_type VARCHAR(100) NOT NULL,
    data_type VARCHAR(100) NOT NULL DEFAULT 'json',
    event_data LONGTEXT,
    event_data_binary LONGBLOB,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    CONSTRAINT unique_instance_activity UNIQUE (instance_id, activity_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS workflow_history_archive (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    activity_id VARCHAR(255) NOT NULL,
    event_type VARCHAR(100) NOT NULL,
    data_type VARCHAR(100) NOT NULL DEFAULT 'json',
    event_data LONGTEXT,
    event_data_binary LONGBLOB,
    created_at DATETIME(6) NOT NULL,
    archived_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS workflow_compensations (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    activity_id VARCHAR(255) NOT NULL,
    activity_name VARCHAR(255) NOT NULL,
    args LONGTEXT NOT NULL,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS workflow_timer_subscriptions (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    timer_id VARCHAR(255) NOT NULL,
    expires_at DATETIME(6) NOT NULL,
    activity_id VARCHAR(255),
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    CONSTRAINT unique_instance_timer UNIQUE (instance_id, timer_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS workflow_group_memberships (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    group_name VARCHAR(255) NOT NULL,
    joined_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    CONSTRAINT unique_instance_group UNIQUE (instance_id, group_name),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS outbox_events (
    event_id VARCHAR(255) NOT NULL PRIMARY KEY,
    event_type VARCHAR(255) NOT NULL,
    event_source VARCHAR(255) NOT NULL,
    data_type VARCHAR(100) NOT NULL DEFAULT 'json',
    event_data LONGTEXT,
    event_data_binary LONGBLOB,
    content_type VARCHAR(100) NOT NULL DEFAULT 'application/json',
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    published_at DATETIME(6),
    status VARCHAR(100) NOT NULL DEFAULT 'pending',
    retry_count INT DEFAULT 0,
    last_error LONGTEXT,
    CONSTRAINT valid_outbox_status CHECK (
        status IN ('pending', 'processing', 'published', 'failed', 'invalid', 'expired'))
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS channel_messages (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    channel VARCHAR(255) NOT NULL,
    message_id VARCHAR(255) NOT NULL UNIQUE,
    data_type VARCHAR(100) NOT NULL,
    data LONGTEXT,
    data_binary LONGBLOB,
    metadata LONGTEXT,
    published_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    CONSTRAINT valid_data_type CHECK (data_type IN ('json', 'binary')),
    CONSTRAINT data_type_consistency CHECK (
        (data_type = 'json' AND data IS NOT NULL AND data_binary IS NULL)
        OR (data_type = 'binary' AND data IS NULL AND data_binary IS NOT NULL))
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS channel_subscriptions (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    channel VARCHAR(255) NOT NULL,
    mode VARCHAR(100) NOT NULL,
    activity_id VARCHAR(255),
    cursor_message_id BIGINT,
    timeout_at DATETIME(6),
    subscribed_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    CONSTRAINT valid_mode CHECK (mode IN ('broadcast', 'competing')),
    CONSTRAINT unique_instance_channel UNIQUE (instance_id, channel),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS channel_delivery_cursors (
    id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    channel VARCHAR(255) NOT NULL,
    instance_id VARCHAR(255) NOT NULL,
    last_delivered_id BIGINT NOT NULL,
    updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    CONSTRAINT unique_channel_instance UNIQUE (channel, instance_id),
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS channel_message_claims (
    message_id VARCHAR(255) NOT NULL PRIMARY KEY,
    instance_id VARCHAR(255) NOT NULL,
    claimed_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    FOREIGN KEY (message_id) REFERENCES channel_messages (message_id) ON DELETE CASCADE,
    FOREIGN KEY (instance_id) REFERENCES workflow_instances (instance_id) ON DELETE CASCADE
) ENGINE=InnoDB COLLATE={collation};

CREATE TABLE IF NOT EXISTS system_locks (
    lock_name VARCHAR(255) NOT NULL PRIMARY KEY,
    locked_by VARCHAR(255),
    locked_at DATETIME(6),
    lock_expires_at DATETIME(6)
) ENGINE=InnoDB COLLATE={collation};

INSERT INTO schema_version (version, description)
SELECT 1, 'shared schema' WHERE NOT EXISTS (SELECT 1 FROM schema_version WHERE version = 1);

-- migrate:down
-- The shared tables are never dropped: another framework may live in them.
