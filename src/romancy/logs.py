"""Logs: every record says of which instance and step it is.

    handler.addFilter(InstanceFilter())
    handler.setFormatter(logging.Formatter("%(levelname)s %(instance)s %(step)s %(message)s"))

The engine's own records (logger ``romancy``) have the fields anyway. The filter adds them to what workflows and
activities log, and None to everything else, so that a format can rely on them.
"""

from __future__ import annotations

import logging

from .engine.ambient import CURRENT_ACTIVITY, CURRENT_RUN

log = logging.getLogger("romancy")


class InstanceFilter(logging.Filter):
    """Adds `instance` and `step` to records that do not have them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "instance"):
            activity, run = CURRENT_ACTIVITY.get(), CURRENT_RUN.get()
            source = activity or run
            record.instance = None if source is None else source.instance_id
            record.step = None if activity is None else activity.step_id
        return True


log.addFilter(InstanceFilter())


def about(instance_id: str, step_id: str | None = None) -> dict[str, str | None]:
    """The fields of a record, to be given as ``extra=``."""
    return {"instance": instance_id, "step": step_id}


def outlook(instance_id: str, pause_sec: float | None = None) -> str:
    """How an instance goes on that is parked for a while, or for good."""
    if pause_sec is None:
        return f"mend that, then `romancy unpark {instance_id}`"
    return f"it is tried again in {pause_sec:.1f} s"
