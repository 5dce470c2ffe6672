"""Whether a storage that has nothing to do holds nothing."""

import asyncio

from romancy.storage import SQLStorage
from romancy.storage.sql.runners.pool import Pool
from romancy.storage.sql.runners.server import ServerRunner
from romancy.storage.sql.runners.sqlite import SQLiteRunner


async def assert_nothing_is_held(storage: SQLStorage) -> None:
    """No connection is taken, nobody stands in line, no transaction is open."""
    runner = storage.runner
    if storage.wakeups._sending is not None:
        await asyncio.wait({storage.wakeups._sending})  # it may borrow a connection to tell what was committed
    if isinstance(runner, SQLiteRunner):
        for _ in range(100):  # the writer answers, and only then puts things away
            if runner._session is None:
                break
            await asyncio.sleep(0.01)
        assert runner._queue.empty()
        assert runner._session is None
        assert runner._writer is None or not runner._writer.in_transaction
        return
    assert isinstance(runner, ServerRunner)
    assert runner._under_way == 0
    for pool in (runner.pool, runner._flush_pool):
        assert_nothing_is_taken(pool)


def assert_nothing_is_taken(pool: Pool) -> None:
    assert (pool._busy, pool._taken) == (0, set())
    assert not [turn for turn in (*pool._line, *pool._urgent_line) if not turn.done()]
    assert pool._transactions._value == pool._for_transactions
    assert len(pool._idle) <= pool._size
    assert not [connection for connection in pool._idle if connection.in_transaction]
