-- Receipts of messages that are gone can be found. (Claims of messages that are gone are refused by their foreign key.)
-- migrate:up

ALTER TABLE romancy_receipts
    ADD INDEX romancy_receipts_message (message_id); -- cleanup_old_channel_messages: receipts of what is gone

-- migrate:down

ALTER TABLE romancy_receipts
    DROP INDEX romancy_receipts_message;
