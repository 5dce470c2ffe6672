-- Each index is here for the query named behind it; none is on a column that every write changes.
-- Every index of SQLite ends with the rowid, which the ids are: (instance_id) finds and sorts like (instance_id, id).
-- Edda leaves the fraction of started_at out: with it, equal moments are equal texts.
-- migrate:up

CREATE INDEX romancy_instances_newest ON workflow_instances (framework, substr(started_at || '.000000', 1, 26), instance_id); -- list_instances: the newest page
CREATE INDEX romancy_instances_newest_any ON workflow_instances (substr(started_at || '.000000', 1, 26), instance_id); -- list_instances(framework=ANY)
CREATE INDEX romancy_instances_by_status ON workflow_instances (framework, status, substr(started_at || '.000000', 1, 26), instance_id); -- list_instances by status; cleanup_stale_locks over the unfinished
CREATE INDEX romancy_instances_runnable ON workflow_instances (framework, runnable_since) WHERE status IN ('running', 'compensating'); -- find_resumable_workflows
CREATE INDEX romancy_instances_finished ON workflow_instances (framework, finished_at) WHERE finished_at IS NOT NULL; -- delete_finished_instances
CREATE INDEX romancy_instances_continued ON workflow_instances (continued_from) WHERE continued_from IS NOT NULL; -- deleting an instance looks for those that continue it
CREATE INDEX romancy_history_pages ON workflow_history (instance_id); -- get_history_paginated
CREATE INDEX romancy_archive_pages ON workflow_history_archive (instance_id); -- get_archived_history
CREATE INDEX romancy_compensations_stack ON workflow_compensations (instance_id); -- get_compensations
CREATE INDEX romancy_timers_due ON workflow_timer_subscriptions (expires_at); -- find_expired_timers
CREATE INDEX romancy_groups_members ON workflow_group_memberships (group_name); -- get_group_members
CREATE INDEX romancy_outbox_due ON outbox_events (created_at) WHERE status IN ('pending', 'processing'); -- get_pending_outbox_events
CREATE INDEX romancy_outbox_published ON outbox_events (published_at) WHERE status = 'published'; -- cleanup_old_outbox_events
CREATE INDEX romancy_messages_queue ON channel_messages (channel); -- the pending messages of a channel
CREATE INDEX romancy_messages_age ON channel_messages (published_at); -- cleanup_old_channel_messages
CREATE INDEX romancy_messages_foreign ON channel_messages (origin) WHERE origin IS NULL; -- find_deliverable_subscriptions: what other frameworks published
CREATE INDEX romancy_subscriptions_channel ON channel_subscriptions (channel); -- the mode and the subscribers of a channel
CREATE INDEX romancy_cursors_instance ON channel_delivery_cursors (instance_id); -- finishing and deleting an instance forgets its cursors
CREATE INDEX romancy_claims_instance ON channel_message_claims (instance_id); -- deleting an instance releases its claims
CREATE INDEX romancy_channels_unsettled ON romancy_channels (unsettled_since) WHERE unsettled_since IS NOT NULL; -- find_deliverable_subscriptions
CREATE INDEX romancy_waits_channel ON romancy_channel_waits (channel); -- who waits for a channel
CREATE INDEX romancy_waits_timeout ON romancy_channel_waits (timeout_at) WHERE timeout_at IS NOT NULL; -- find_expired_channel_subscriptions
CREATE INDEX romancy_instance_waits_awaited ON romancy_instance_waits (awaited_id); -- finishing an instance wakes who waits for it

-- migrate:down

DROP INDEX romancy_instances_newest;
DROP INDEX romancy_instances_newest_any;
DROP INDEX romancy_instances_by_status;
DROP INDEX romancy_instances_runnable;
DROP INDEX romancy_instances_finished;
DROP INDEX romancy_instances_continued;
DROP INDEX romancy_history_pages;
DROP INDEX romancy_archive_pages;
DROP INDEX romancy_compensations_stack;
DROP INDEX romancy_timers_due;
DROP INDEX romancy_groups_members;
DROP INDEX romancy_outbox_due;
DROP INDEX romancy_outbox_published;
DROP INDEX romancy_messages_queue;
DROP INDEX romancy_messages_age;
DROP INDEX romancy_messages_foreign;
DROP INDEX romancy_subscriptions_channel;
DROP INDEX romancy_cursors_instance;
DROP INDEX romancy_claims_instance;
DROP INDEX romancy_channels_unsettled;
DROP INDEX romancy_waits_channel;
DROP INDEX romancy_waits_timeout;
DROP INDEX romancy_instance_waits_awaited;
