"""``romancy demo``"""

from __future__ import annotations

import argparse

from ..demo import tell


async def run(options: argparse.Namespace) -> int:
    """Tell the story."""
    await tell()
    return 0
