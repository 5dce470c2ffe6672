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
