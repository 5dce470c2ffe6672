"""Every exported name of the reference (Romancy for Go, package storage, v0.6.1), and what it is called here.

`test_reference.py` compares this table with what `romancy.storage` offers.
"""

FUNCTIONS = {
    "InitializeTestSchema": "initialize_test_schema(storage)",
    "InitializeTestSchemaForStorage": "initialize_test_schema(storage)",
    "InitializeTestSchemaMySQL": "initialize_test_schema(storage)",
    "InitializeTestSchemaPostgres": "initialize_test_schema(storage)",
    "ValidateJSONPath": "validate_json_path(path)",
    "NewDriver": "new_driver(db_url)",
    "NewHistoryIterator": "HistoryIterator(storage, instance_id, options)",
    "NewInputFilterBuilder": "InputFilterBuilder(driver)",
    "NewMySQLStorage": "MySQLStorage(conn_str)",
    "NewPostgresStorage": "PostgresStorage(conn_str)",
    "NewSQLiteStorage": "SQLiteStorage(path)",
}

ERRORS = {"ErrWorkflowNotCancellable": "WorkflowNotCancellableError"}

METHODS = {
    "ChannelManager": {
        "PublishToChannel": "publish_to_channel(channel_name, data, metadata)",
        "SubscribeToChannel": "subscribe_to_channel(instance_id, channel_name, mode)",
        "UnsubscribeFromChannel": "unsubscribe_from_channel(instance_id, channel_name)",
        "GetChannelSubscription": "get_channel_subscription(instance_id, channel_name)",
        "GetChannelMode": "get_channel_mode(channel_name)",
        "RegisterChannelReceiveAndReleaseLock": (
            "register_channel_receive_and_release_lock(instance_id, channel_name, worker_id, activity_id, timeout_at)"
        ),
        "GetPendingChannelMessages": "get_pending_channel_messages(channel_name, after_id, limit)",
        "GetPendingChannelMessagesForInstance": "get_pending_channel_messages_for_instance(instance_id, channel_name)",
        "ClaimChannelMessage": "claim_channel_message(message_id, instance_id)",
        "DeleteChannelMessage": "delete_channel_message(message_id)",
        "UpdateDeliveryCursor": "update_delivery_cursor(instance_id, channel_name, last_message_id)",
        "GetDeliveryCursor": "get_delivery_cursor(instance_id, channel_name)",
        "GetChannelSubscribersWaiting": "get_channel_subscribers_waiting(channel_name)",
        "ClearChannelWaitingState": "clear_channel_waiting_state(instance_id, channel_name)",
        "DeliverChannelMessage": "deliver_channel_message(instance_id, message)",
        "DeliverChannelMessageWithLock": (
            "deliver_channel_message_with_lock(instance_id, channel_name, message, worker_id, lock_timeout_sec)"
        ),
        "CleanupOldChannelMessages": "cleanup_old_channel_messages(older_than)",
        "FindExpiredChannelSubscriptions": "find_expired_channel_subscriptions(limit)",
    },
    "CompensationManager": {
        "AddCompensation": "add_compensation(entry)",
        "GetCompensations": "get_compensations(instance_id)",
    },
    "Driver": {
        "DriverName": "driver_name()",
        "GetCurrentTimeExpr": "get_current_time_expr()",
        "MakeDatetimeComparable": "make_datetime_comparable(column)",
        "SelectForUpdateSkipLocked": "select_for_update_skip_locked()",
        "Placeholder": "placeholder(n)",
        "OnConflictDoNothing": "on_conflict_do_nothing(conflict_columns)",
        "ReturningClause": "returning_clause(columns)",
        "JSONExtract": "json_extract(column, path)",
        "JSONCompare": "json_compare(extract_expr, value, placeholder_num)",
    },
    "Executor": {
        "ExecContext": "execute(query, args)",
        "QueryContext": "fetch_all(query, args)",
        "QueryRowContext": "fetch_one(query, args)",
    },
    "GroupManager": {
        "JoinGroup": "join_group(instance_id, group_name)",
        "LeaveGroup": "leave_group(instance_id, group_name)",
        "GetGroupMembers": "get_group_members(group_name)",
        "LeaveAllGroups": "leave_all_groups(instance_id)",
    },
    "HistoryArchiveManager": {
        "ArchiveHistory": "archive_history(instance_id)",
        "GetArchivedHistory": "get_archived_history(instance_id)",
        "CleanupInstanceSubscriptions": "cleanup_instance_subscriptions(instance_id)",
    },
    "HistoryIterator": {
        "Close": "aclose()",
        "Collect": "collect()",
        "Next": "__anext__()",
    },
    "HistoryManager": {
        "AppendHistory": "append_history(event)",
        "GetHistoryPaginated": "get_history_paginated(instance_id, after_id, limit)",
        "GetHistoryCount": "get_history_count(instance_id)",
    },
    "InputFilterBuilder": {
        "BuildFilterQuery": "build_filter_query(input_filters, start_placeholder)",
    },
    "InstanceManager": {
        "CreateInstance": "create_instance(instance)",
        "GetInstance": "get_instance(instance_id)",
        "UpdateInstanceStatus": "update_instance_status(instance_id, status, error_msg)",
        "UpdateInstanceActivity": "update_instance_activity(instance_id, activity_id)",
        "UpdateInstanceOutput": "update_instance_output(instance_id, output_data)",
        "CancelInstance": "cancel_instance(instance_id, reason)",
        "ListInstances": "list_instances(options)",
        "FindResumableWorkflows": "find_resumable_workflows(limit)",
    },
    "LockManager": {
        "TryAcquireLock": "try_acquire_lock(instance_id, worker_id, timeout_sec)",
        "ReleaseLock": "release_lock(instance_id, worker_id)",
        "RefreshLock": "refresh_lock(instance_id, worker_id, timeout_sec)",
        "CleanupStaleLocks": "cleanup_stale_locks(timeout_sec)",
    },
    "OutboxManager": {
        "AddOutboxEvent": "add_outbox_event(event)",
        "GetPendingOutboxEvents": "get_pending_outbox_events(limit)",
        "MarkOutboxEventSent": "mark_outbox_event_sent(event_id)",
        "MarkOutboxEventFailed": "mark_outbox_event_failed(event_id)",
        "IncrementOutboxAttempts": "increment_outbox_attempts(event_id)",
        "CleanupOldOutboxEvents": "cleanup_old_outbox_events(older_than)",
    },
    "PostgresStorage": {
        "SetNotifyEnabled": "set_notify_enabled(enabled)",
        "IsNotifyEnabled": "is_notify_enabled()",
    },
    "Storage": {
        "Initialize": "initialize()",
        "Close": "close()",
        "DB": "db()",
    },
    "SystemLockManager": {
        "TryAcquireSystemLock": "try_acquire_system_lock(lock_name, worker_id, timeout_sec)",
        "ReleaseSystemLock": "release_system_lock(lock_name, worker_id)",
        "CleanupExpiredSystemLocks": "cleanup_expired_system_locks()",
    },
    "TimerSubscriptionManager": {
        "RegisterTimerSubscription": "register_timer_subscription(subscription)",
        "RegisterTimerSubscriptionAndReleaseLock": (
            "register_timer_subscription_and_release_lock(subscription, instance_id, worker_id)"
        ),
        "FindExpiredTimers": "find_expired_timers(limit)",
        "RemoveTimerSubscription": "remove_timer_subscription(instance_id, timer_id)",
    },
    "TransactionManager": {
        "BeginTransaction": "begin_transaction()",
        "CommitTransaction": "commit_transaction()",
        "RollbackTransaction": "rollback_transaction()",
        "InTransaction": "in_transaction()",
        "Conn": "conn()",
        "RegisterPostCommitCallback": "register_post_commit_callback(cb)",
    },
}
"""The methods of each type; an error that the reference keeps for later (`HistoryIterator.Err`) is raised here."""

MANAGERS = [
    "TransactionManager",
    "InstanceManager",
    "LockManager",
    "HistoryManager",
    "TimerSubscriptionManager",
    "OutboxManager",
    "CompensationManager",
    "ChannelManager",
    "GroupManager",
    "SystemLockManager",
    "HistoryArchiveManager",
]
"""What `Storage` consists of, besides its own methods."""

STORAGES = ["MySQLStorage", "PostgresStorage", "SQLiteStorage"]
DRIVERS = ["MySQLDriver", "PostgresDriver", "SQLiteDriver"]

FIELDS = {
    "ArchivedHistoryEvent": {
        "ID": "id",
        "OriginalID": "original_id",
        "InstanceID": "instance_id",
        "ActivityID": "activity_id",
        "EventType": "event_type",
        "EventData": "event_data",
        "EventDataBinary": "event_data_binary",
        "DataType": "data_type",
        "OriginalCreatedAt": "original_created_at",
        "ArchivedAt": "archived_at",
    },
    "ChannelDeliveryCursor": {
        "ID": "id",
        "InstanceID": "instance_id",
        "Channel": "channel",
        "LastDeliveredID": "last_delivered_id",
        "UpdatedAt": "updated_at",
    },
    "ChannelDeliveryResult": {
        "InstanceID": "instance_id",
        "WorkflowName": "workflow_name",
        "ActivityID": "activity_id",
    },
    "ChannelMessage": {
        "ID": "id",
        "Channel": "channel",
        "MessageID": "message_id",
        "DataType": "data_type",
        "Data": "data",
        "DataBinary": "data_binary",
        "Metadata": "metadata",
        "PublishedAt": "published_at",
    },
    "ChannelMessageClaim": {
        "ID": "id",
        "MessageID": "message_id",
        "InstanceID": "instance_id",
        "ClaimedAt": "claimed_at",
    },
    "ChannelSubscription": {
        "ID": "id",
        "InstanceID": "instance_id",
        "Channel": "channel",
        "Mode": "mode",
        "CursorMessageID": "cursor_message_id",
        "TimeoutAt": "timeout_at",
        "ActivityID": "activity_id",
        "SubscribedAt": "subscribed_at",
    },
    "CompensationEntry": {
        "ID": "id",
        "InstanceID": "instance_id",
        "ActivityID": "activity_id",
        "ActivityName": "activity_name",
        "Args": "args",
        "CreatedAt": "created_at",
    },
    "GroupMembership": {
        "ID": "id",
        "InstanceID": "instance_id",
        "GroupName": "group_name",
        "JoinedAt": "joined_at",
    },
    "HistoryEvent": {
        "ID": "id",
        "InstanceID": "instance_id",
        "ActivityID": "activity_id",
        "EventType": "event_type",
        "EventData": "event_data",
        "EventDataBinary": "event_data_binary",
        "DataType": "data_type",
        "CreatedAt": "created_at",
    },
    "HistoryIteratorOptions": {
        "BatchSize": "batch_size",
    },
    "ListInstancesOptions": {
        "Limit": "limit",
        "PageToken": "page_token",
        "StatusFilter": "status_filter",
        "WorkflowNameFilter": "workflow_name_filter",
        "InstanceIDFilter": "instance_id_filter",
        "StartedAfter": "started_after",
        "StartedBefore": "started_before",
        "InputFilters": "input_filters",
    },
    "OutboxEvent": {
        "EventID": "event_id",
        "EventType": "event_type",
        "EventSource": "event_source",
        "EventData": "event_data",
        "EventDataBinary": "event_data_binary",
        "DataType": "data_type",
        "ContentType": "content_type",
        "Status": "status",
        "RetryCount": "retry_count",
        "LastError": "last_error",
        "PublishedAt": "published_at",
        "CreatedAt": "created_at",
        "UpdatedAt": "updated_at",
    },
    "PaginationResult": {
        "Instances": "instances",
        "NextPageToken": "next_page_token",
        "HasMore": "has_more",
    },
    "ResumableWorkflow": {
        "InstanceID": "instance_id",
        "WorkflowName": "workflow_name",
    },
    "StaleWorkflowInfo": {
        "InstanceID": "instance_id",
        "WorkflowName": "workflow_name",
    },
    "SystemLock": {
        "LockName": "lock_name",
        "LockedBy": "locked_by",
        "LockedAt": "locked_at",
        "ExpiresAt": "expires_at",
    },
    "TimerSubscription": {
        "ID": "id",
        "InstanceID": "instance_id",
        "TimerID": "timer_id",
        "ExpiresAt": "expires_at",
        "ActivityID": "activity_id",
        "CreatedAt": "created_at",
    },
    "WorkflowInstance": {
        "InstanceID": "instance_id",
        "WorkflowName": "workflow_name",
        "Framework": "framework",
        "Status": "status",
        "InputData": "input_data",
        "OutputData": "output_data",
        "CurrentActivityID": "current_activity_id",
        "SourceHash": "source_hash",
        "OwnerService": "owner_service",
        "ContinuedFrom": "continued_from",
        "LockedBy": "locked_by",
        "LockedAt": "locked_at",
        "LockTimeoutSec": "lock_timeout_seconds",
        "LockExpiresAt": "lock_expires_at",
        "StartedAt": "started_at",
        "UpdatedAt": "updated_at",
    },
}
"""The fields of each model, under their names in JSON; the deprecated ones of `ListInstancesOptions` are left out."""

VALUES = {
    "ChannelMode": {
        "ChannelModeBroadcast": "broadcast",
        "ChannelModeCompeting": "competing",
        "ChannelModeDirect": "direct",
    },
    "HistoryEventType": {
        "HistoryActivityCompleted": "ActivityCompleted",
        "HistoryActivityFailed": "ActivityFailed",
        "HistoryEventReceived": "EventReceived",
        "HistoryTimerExpired": "TimerExpired",
        "HistoryChannelMessageReceived": "ChannelMessageReceived",
        "HistoryMessageTimeout": "MessageTimeout",
        "HistoryCompensationExecuted": "CompensationExecuted",
        "HistoryCompensationFailed": "CompensationFailed",
        "HistoryWorkflowFailed": "WorkflowFailed",
        "HistoryWorkflowCancelled": "WorkflowCancelled",
    },
    "WorkflowStatus": {
        "StatusRunning": "running",
        "StatusCompleted": "completed",
        "StatusFailed": "failed",
        "StatusCancelled": "cancelled",
        "StatusWaitingForEvent": "waiting_for_event",
        "StatusWaitingForTimer": "waiting_for_timer",
        "StatusWaitingForMessage": "waiting_for_message",
        "StatusRecurred": "recurred",
        "StatusCompensating": "compensating",
    },
}
"""The constants of each enumeration."""
