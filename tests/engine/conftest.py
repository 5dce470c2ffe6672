"""Apps for tests: on the test's own database, with short pauses."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from romancy import App, Settings, Workflow
from tests.harness import Harness

MakeApp = Callable[..., Any]

QUICK = Settings(poll_sec=0.1, heartbeat_sec=0.2, lock_timeout_sec=2.0, drain_sec=0.5)


@pytest.fixture
async def make_app(harness: Harness) -> AsyncIterator[MakeApp]:
    """``app = await make_app(workflow, …)``: a running app, ended with the test."""
    async with AsyncExitStack() as apps:

        async def make(*workflows: Workflow[Any, Any], **options: Any) -> App:
            options = {"settings": QUICK, **options}
            return await apps.enter_async_context(App(harness.url, workflows=workflows, **options))

        yield make
