-- Each index is here for the query named behind it; none is on a column that every write changes.
-- InnoDB keeps an index for each foreign key, and every index ends with the primary key: (instance_id, id) of the archive and
-- of the compensations, the claims, the cursors and the continued instances need none of ours.
-- migrate:up

CREATE INDEX romancy_instances_newest ON workflow_instances (framework, started_at, instance_id); -- list_instances: the newest page
CREATE INDEX romancy_instances_newest_any ON workflow_instances (started_at, instance_id); -- list_instances(framework=ANY)
CREATE INDEX romancy_instances_by_status ON workflow_instances (framework, status, started_at, instance_id); -- list_instances by status; cleanup_stale_locks over the unfinished
CREATE INDEX romancy_instances_runnable ON workflow_instances (framework, status, runnable_since); -- find_resumable_workflows
CREATE INDEX romancy_instances_finished ON workflow_instances (framework, finished_at); -- delete_finished_instances
CREATE INDEX romancy_history_pages ON workflow_history (instance_id, id); -- get_history_paginated
CREATE INDEX romancy_timers_due ON workflow_timer_subscriptions (expires_at); -- find_expired_timers
CREATE INDEX romancy_groups_members ON workflow_group_memberships (group_name, id); -- get_group_members
CREATE INDEX romancy_outbox_due ON outbox_events (status, created_at); -- get_pending_outbox_events
CREATE INDEX romancy_outbox_published ON outbox_events (status, published_at); -- cleanup_old_outbox_events
CREATE INDEX romancy_messages_queue ON channel_messages (channel, id); -- the pending messages of a channel
CREATE INDEX romancy_messages_age ON channel_messages (published_at); -- cleanup_old_channel_messages
CREATE INDEX romancy_messages_foreign ON channel_messages (origin, id); -- find_deliverable_subscriptions: what other frameworks published
CREATE INDEX romancy_subscriptions_channel ON channel_subscriptions (channel); -- the mode and the subscribers of a channel
CREATE INDEX romancy_channels_unsettled ON romancy_channels (unsettled_since); -- find_deliverable_subscriptions
CREATE INDEX romancy_waits_channel ON romancy_channel_waits (channel, id); -- who waits for a channel
CREATE INDEX romancy_waits_timeout ON romancy_channel_waits (timeout_at); -- find_expired_channel_subscriptions
CREATE INDEX romancy_instance_waits_awaited ON romancy_instance_waits (awaited_id); -- finishing an instance wakes who waits for it

-- migrate:down

DROP INDEX romancy_instances_newest ON workflow_instances;
DROP INDEX romancy_instances_newest_any ON workflow_instances;
DROP INDEX romancy_instances_by_status ON workflow_instances;
DROP INDEX romancy_instances_runnable ON workflow_instances;
DROP INDEX romancy_instances_finished ON workflow_instances;
DROP INDEX romancy_history_pages ON workflow_history;
DROP INDEX romancy_timers_due ON workflow_timer_subscriptions;
DROP INDEX romancy_groups_members ON workflow_group_memberships;
DROP INDEX romancy_outbox_due ON outbox_events;
DROP INDEX romancy_outbox_published ON outbox_events;
DROP INDEX romancy_messages_queue ON channel_messages;
DROP INDEX romancy_messages_age ON channel_messages;
DROP INDEX romancy_messages_foreign ON channel_messages;
DROP INDEX romancy_subscriptions_channel ON channel_subscriptions;
DROP INDEX romancy_channels_unsettled ON romancy_channels;
DROP INDEX romancy_waits_channel ON romancy_channel_waits;
DROP INDEX romancy_waits_timeout ON romancy_channel_waits;
DROP INDEX romancy_instance_waits_awaited ON romancy_instance_waits;
