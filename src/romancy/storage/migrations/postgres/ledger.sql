CREATE TABLE IF NOT EXISTS schema_migrations (
    version VARCHAR(255) PRIMARY KEY
);

CREATE TABLE IF NOT EXISTS romancy_migrations (
    version VARCHAR(255) NOT NULL PRIMARY KEY,
    checksum VARCHAR(64) NOT NULL,
    applied_at TIMESTAMP(6) NOT NULL DEFAULT timezone('UTC', clock_timestamp())
);
