"""Looking for the next message of a channel makes no table on disk: a payload goes from its row to the reader."""

from typing import Any

import pytest

from romancy.storage import ChannelMode, SQLStorage
from tests.harness import Harness


async def tables_on_disk(storage: SQLStorage) -> int:
    """How many tables this connection has had made on disk so far."""
    found: Any = await storage.conn().fetch_all("SHOW SESSION STATUS LIKE 'Created_tmp_disk_tables'")
    return int(found[0][1])


@pytest.mark.databases("mariadb", "mysql")
@pytest.mark.parametrize("mode", [ChannelMode.BROADCAST, ChannelMode.COMPETING])
async def test_pending_messages_are_found_without_a_table_on_disk(
    harness: Harness, storage: SQLStorage, mode: ChannelMode
) -> None:
    instance_id = await harness.instance(storage)
    await storage.subscribe_to_channel(instance_id, "orders", mode)
    for number in range(3):
        await storage.publish_to_channel("orders", f'{{"number": {number}}}')
    async with storage.transaction():
        before = await tables_on_disk(storage)
        looking = await tables_on_disk(storage) - before
        pending = await storage.get_pending_channel_messages_for_instance(instance_id, "orders")
        made = await tables_on_disk(storage) - before - 2 * looking
    assert len(pending) == 3
    assert made == 0
