"""The user's own SQL through `conn()`: named parameters, and no say in transactions."""

from datetime import UTC, datetime

import pytest

from romancy.storage import SQLStorage, TransactionError
from tests.harness import Harness


@pytest.mark.parametrize("statement", ["ROLLBACK", "commit", "  BEGIN", "SAVEPOINT mine", "START TRANSACTION", "END;"])
async def test_own_sql_cannot_end_or_open_a_transaction(storage: SQLStorage, statement: str) -> None:
    with pytest.raises(TransactionError, match=r"storage\.transaction\(\)"):
        await storage.conn().execute(statement)


async def test_braces_in_own_sql_are_plain_text(storage: SQLStorage) -> None:
    assert await storage.conn().fetch_value("SELECT CASE WHEN :one = 1 THEN '{now}' END", one=1) == "{now}"


async def test_a_parameter_of_own_sql_may_be_named_like_a_time_and_be_text(storage: SQLStorage) -> None:
    assert await storage.conn().fetch_value("SELECT CASE WHEN :made_at = 'x' THEN 1 END", made_at="x") == 1


async def test_a_time_given_to_own_sql_compares_with_the_stored_ones(harness: Harness, storage: SQLStorage) -> None:
    started_at = datetime(2024, 2, 29, 12, 30, 0, 123456, tzinfo=UTC)
    instance_id = await harness.instance(storage, started_at=started_at)
    query = "SELECT instance_id FROM workflow_instances WHERE started_at = :moment"
    assert await storage.conn().fetch_value(query, moment=started_at) == instance_id


async def test_a_parameter_without_a_value_is_named(storage: SQLStorage) -> None:
    with pytest.raises(TypeError, match="item"):
        await storage.conn().fetch_all("SELECT 1 WHERE :pieces = :item", pieces=1)
