-- Each index is here for the query named behind it; none is on a column that every write changes.
-- InnoDB keeps an index for each foreign key, and every index ends with the primary key: (instance_id, id) of the archive and
-- of the compensations, the claims, the cursors and the continued instances need none of ours.
-- One ALTER per table: the table is read once for all of them, and writers go on meanwhile.
-- migrate:up

ALTER TABLE workflow_instances
    ADD INDEX romancy_instances_newest (framework, started_at, instance_id), -- list_instances: the newest page
    ADD INDEX romancy_instances_newest_any (started_at, instance_id), -- list_instances(framework=ANY)
    ADD INDEX romancy_instances_by_status (framework, status, started_at, instance_id), -- list_instances by status; cleanup_stale_locks over the unfinished
    ADD INDEX romancy_instances_runnable (framework, status, runnable_since), -- find_resumable_workflows
    ADD INDEX romancy_instances_finished (framework, finished_at); -- delete_finished_instances

ALTER TABLE workflow_history
    ADD INDEX romancy_history_pages (instance_id, id); -- get_history_paginated

ALTER TABLE workflow_timer_subscriptions
    ADD INDEX romancy_timers_due (expires_at); -- find_expired_timers

ALTER TABLE workflow_group_memberships
    ADD INDEX romancy_groups_members (group_name, id); -- get_group_members

ALTER TABLE outbox_events
    ADD INDEX romancy_outbox_due (status, created_at, sequence), -- get_pending_outbox_events
    ADD INDEX romancy_outbox_published (status, published_at); -- cleanup_old_outbox_events

ALTER TABLE channel_messages
    ADD INDEX romancy_messages_queue (channel, id), -- the pending messages of a channel
    ADD INDEX romancy_messages_age (published_at), -- cleanup_old_channel_messages
    ADD INDEX romancy_messages_foreign (origin, id); -- find_deliverable_subscriptions: what other frameworks published

ALTER TABLE channel_subscriptions
    ADD INDEX romancy_subscriptions_channel (channel); -- the mode and the subscribers of a channel

ALTER TABLE romancy_channels
    ADD INDEX romancy_channels_unsettled (unsettled_since); -- find_deliverable_subscriptions

ALTER TABLE romancy_channel_waits
    ADD INDEX romancy_waits_channel (channel, id), -- who waits for a channel
    ADD INDEX romancy_waits_timeout (timeout_at); -- find_expired_channel_subscriptions

ALTER TABLE romancy_instance_waits
    ADD INDEX romancy_instance_waits_awaited (awaited_id); -- finishing an instance wakes who waits for it

-- migrate:down

ALTER TABLE workflow_instances
    DROP INDEX romancy_instances_newest,
    DROP INDEX romancy_instances_newest_any,
    DROP INDEX romancy_instances_by_status,
    DROP INDEX romancy_instances_runnable,
    DROP INDEX romancy_instances_finished;
ALTER TABLE workflow_history
    DROP INDEX romancy_history_pages;
ALTER TABLE workflow_timer_subscriptions
    DROP INDEX romancy_timers_due;
ALTER TABLE workflow_group_memberships
    DROP INDEX romancy_groups_members;
ALTER TABLE outbox_events
    DROP INDEX romancy_outbox_due,
    DROP INDEX romancy_outbox_published;
ALTER TABLE channel_messages
    DROP INDEX romancy_messages_queue,
    DROP INDEX romancy_messages_age,
    DROP INDEX romancy_messages_foreign;
ALTER TABLE channel_subscriptions
    DROP INDEX romancy_subscriptions_channel;
ALTER TABLE romancy_channels
    DROP INDEX romancy_channels_unsettled;
ALTER TABLE romancy_channel_waits
    DROP INDEX romancy_waits_channel,
    DROP INDEX romancy_waits_timeout;
ALTER TABLE romancy_instance_waits
    DROP INDEX romancy_instance_waits_awaited;
