"""What instances have done: history and its archive, compensations, states."""

from collections.abc import Sequence

from msgspec.structs import replace

from romancy.storage import (
    Appended,
    ArchivedHistoryEvent,
    CompensationEntry,
    HistoryConflictError,
    HistoryEvent,
    InstanceNotFoundError,
    Lock,
    LockLostError,
    StorageError,
)

from .memory import EPOCH, WAITING, Memory


class Steps(Memory):
    """Implements `HistoryManager`, `HistoryArchiveManager`, `CompensationManager` and `StateManager`."""

    def append_history(self, event: HistoryEvent, *, lock: Lock | None = None) -> Appended:
        if lock is not None and lock.instance_id != event.instance_id:
            raise LockLostError(event.instance_id, lock.worker_id)
        if event.instance_id not in self.instances:
            raise InstanceNotFoundError(event.instance_id)
        self._hold(event.instance_id, lock)
        recorded = self.history.get((event.instance_id, event.activity_id))
        if recorded is None:
            history_id = self._record_event(event).id or 0
            if lock is not None:
                self.recorded_under[history_id] = lock.token
            return Appended(history_id, already_recorded=False)
        same = (event.event_type, event.event_data, event.event_data_binary) == (
            recorded.event_type,
            recorded.event_data,
            recorded.event_data_binary,
        )
        repeated = lock is not None and self.recorded_under.get(recorded.id or 0) == lock.token
        if repeated and same and not self.in_transaction:
            return Appended(recorded.id or 0, already_recorded=True)
        raise HistoryConflictError(recorded)

    def append_history_many(
        self, events: Sequence[HistoryEvent], *, lock: Lock | None = None
    ) -> list[Appended | StorageError]:
        if lock is not None:
            self._hold(lock.instance_id, lock)
        answers: list[Appended | StorageError] = []
        for event in events:
            try:
                answers.append(self.append_history(event, lock=lock))
            except (HistoryConflictError, InstanceNotFoundError) as error:
                answers.append(error)
        return answers

    def get_history(self, instance_id: str) -> list[HistoryEvent]:
        """All pages together."""
        return [event for key, event in self.history.items() if key[0] == instance_id]

    def get_history_event(self, instance_id: str, activity_id: str) -> HistoryEvent | None:
        return self.history.get((instance_id, activity_id))

    def get_history_count(self, instance_id: str) -> int:
        return sum(key[0] == instance_id for key in self.history)

    # Archive.

    def archive_history(self, instance_id: str, *, lock: Lock | None = None) -> int:
        self._hold(instance_id, lock)
        return self._archive(instance_id)

    def get_archived_history(self, instance_id: str) -> list[ArchivedHistoryEvent]:
        return [event for event in self.archive if event.instance_id == instance_id]

    def cleanup_instance_subscriptions(self, instance_id: str) -> None:
        instance = self.instances.get(instance_id)
        if instance is None:
            return
        self._forget_waits(instance_id)
        self._forget_subscriptions(instance_id)
        if instance.status in WAITING:
            self._wake(instance_id, keep_lock=True)

    def _archive(self, instance_id: str) -> int:
        moved = [event for key, event in self.history.items() if key[0] == instance_id]
        for event in moved:
            del self.history[instance_id, event.activity_id]
            self.archive.append(
                ArchivedHistoryEvent(
                    instance_id,
                    event.activity_id,
                    event.event_type,
                    id=self._id(),
                    original_id=event.id or 0,
                    original_created_at=event.created_at or EPOCH,
                    archived_at=self.now,
                    event_data=event.event_data,
                    event_data_binary=event.event_data_binary,
                )
            )
        return len(moved)

    # Compensations.

    def add_compensation(
        self, entry: CompensationEntry, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, entry.instance_id)
        if recorded is not None:
            return recorded
        self._hold(entry.instance_id)
        if not any(
            (entry.instance_id, entry.activity_id) == (other.instance_id, other.activity_id)
            for other in self.compensations
        ):
            self.compensations.append(replace(entry, id=self._id(), created_at=self.now))
        return None

    def get_compensations(self, instance_id: str) -> list[CompensationEntry]:
        return [entry for entry in reversed(self.compensations) if entry.instance_id == instance_id]

    # States.

    def set_instance_state(
        self, instance_id: str, state: str, *, lock: Lock | None = None, record: HistoryEvent | None = None
    ) -> HistoryEvent | None:
        recorded = self._begin_step(lock, record, instance_id)
        if recorded is None:
            self._hold_unfinished(instance_id, None, "showing a new state")
            self.states[instance_id] = state
        return recorded

    def get_instance_state(self, instance_id: str) -> str | None:
        return self.states.get(instance_id)
