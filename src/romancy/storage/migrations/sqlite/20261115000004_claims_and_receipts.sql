-- A claim of a message that is gone is refused, and receipts of messages that are gone can be found.
-- migrate:up

-- Other frameworks look at a queue and claim from it in two transactions, and check no foreign keys here: without this
-- they claim, and process, what we have delivered in between. Romancy for Go claims by the message's number.
CREATE TRIGGER romancy_claim_of_nothing BEFORE INSERT ON channel_message_claims
WHEN NOT EXISTS (SELECT 1 FROM channel_messages WHERE message_id = NEW.message_id)
     AND NOT EXISTS (SELECT 1 FROM channel_messages WHERE id = NEW.message_id)
BEGIN
    SELECT RAISE(ABORT, 'the message is gone');
END;

CREATE INDEX romancy_receipts_message ON romancy_receipts (message_id); -- cleanup_old_channel_messages: receipts of what is gone

-- migrate:down

DROP INDEX romancy_receipts_message;
DROP TRIGGER romancy_claim_of_nothing;
