"""An app for ``romancy worker``."""

import os

from tests.acceptance.failing_over import app as make

app = make(os.environ.get("ROMANCY_TEST_URL", "sqlite://:memory:"))
