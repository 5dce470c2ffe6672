-- Receipts of messages that are gone can be found. (Claims of messages that are gone are refused by their foreign key.)
-- migrate:up transaction:false

CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_receipts_message ON romancy_receipts (message_id); -- cleanup_old_channel_messages: receipts of what is gone

-- migrate:down transaction:false

DROP INDEX CONCURRENTLY IF EXISTS romancy_receipts_message;
