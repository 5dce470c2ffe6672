-- Each index is here for the query named behind it; none is on a column that every write changes.
-- Built without blocking writers, outside a transaction; a half-built one is dropped and built again.
-- migrate:up transaction:false

CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_newest ON workflow_instances (framework, started_at, instance_id COLLATE "C"); -- list_instances: the newest page
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_newest_any ON workflow_instances (started_at, instance_id COLLATE "C"); -- list_instances(framework=ANY)
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_by_status ON workflow_instances (framework, status, started_at, instance_id COLLATE "C"); -- list_instances by status; cleanup_stale_locks over the unfinished
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_runnable ON workflow_instances (framework, runnable_since) WHERE status IN ('running', 'compensating'); -- find_resumable_workflows
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_finished ON workflow_instances (framework, finished_at) WHERE finished_at IS NOT NULL; -- delete_finished_instances
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instances_continued ON workflow_instances (continued_from) WHERE continued_from IS NOT NULL; -- deleting an instance looks for those that continue it
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_history_pages ON workflow_history (instance_id, id); -- get_history_paginated
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_archive_pages ON workflow_history_archive (instance_id, id); -- get_archived_history
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_compensations_stack ON workflow_compensations (instance_id, id); -- get_compensations
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_timers_due ON workflow_timer_subscriptions (expires_at, id); -- find_expired_timers
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_groups_members ON workflow_group_memberships (group_name, id); -- get_group_members
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_outbox_due ON outbox_events (created_at, sequence) WHERE status IN ('pending', 'processing'); -- get_pending_outbox_events
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_outbox_published ON outbox_events (published_at) WHERE status = 'published'; -- cleanup_old_outbox_events
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_messages_queue ON channel_messages (channel, id); -- the pending messages of a channel
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_messages_age ON channel_messages (published_at, id); -- cleanup_old_channel_messages
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_messages_foreign ON channel_messages (id) WHERE origin IS NULL; -- find_deliverable_subscriptions: what other frameworks published
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_subscriptions_channel ON channel_subscriptions (channel, id); -- the mode and the subscribers of a channel
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_cursors_instance ON channel_delivery_cursors (instance_id); -- finishing and deleting an instance forgets its cursors
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_claims_instance ON channel_message_claims (instance_id); -- deleting an instance releases its claims
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_channels_unsettled ON romancy_channels (unsettled_since) WHERE unsettled_since IS NOT NULL; -- find_deliverable_subscriptions
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_waits_channel ON romancy_channel_waits (channel, id); -- who waits for a channel
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_waits_timeout ON romancy_channel_waits (timeout_at) WHERE timeout_at IS NOT NULL; -- find_expired_channel_subscriptions
CREATE INDEX CONCURRENTLY IF NOT EXISTS romancy_instance_waits_awaited ON romancy_instance_waits (awaited_id); -- finishing an instance wakes who waits for it

-- migrate:down transaction:false

DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_newest;
DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_newest_any;
DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_by_status;
DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_runnable;
DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_finished;
DROP INDEX CONCURRENTLY IF EXISTS romancy_instances_continued;
DROP INDEX CONCURRENTLY IF EXISTS romancy_history_pages;
DROP INDEX CONCURRENTLY IF EXISTS romancy_archive_pages;
DROP INDEX CONCURRENTLY IF EXISTS romancy_compensations_stack;
DROP INDEX CONCURRENTLY IF EXISTS romancy_timers_due;
DROP INDEX CONCURRENTLY IF EXISTS romancy_groups_members;
DROP INDEX CONCURRENTLY IF EXISTS romancy_outbox_due;
DROP INDEX CONCURRENTLY IF EXISTS romancy_outbox_published;
DROP INDEX CONCURRENTLY IF EXISTS romancy_messages_queue;
DROP INDEX CONCURRENTLY IF EXISTS romancy_messages_age;
DROP INDEX CONCURRENTLY IF EXISTS romancy_messages_foreign;
DROP INDEX CONCURRENTLY IF EXISTS romancy_subscriptions_channel;
DROP INDEX CONCURRENTLY IF EXISTS romancy_cursors_instance;
DROP INDEX CONCURRENTLY IF EXISTS romancy_claims_instance;
DROP INDEX CONCURRENTLY IF EXISTS romancy_channels_unsettled;
DROP INDEX CONCURRENTLY IF EXISTS romancy_waits_channel;
DROP INDEX CONCURRENTLY IF EXISTS romancy_waits_timeout;
DROP INDEX CONCURRENTLY IF EXISTS romancy_instance_waits_awaited;
