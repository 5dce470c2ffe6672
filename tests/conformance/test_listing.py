"""Listing: newest first, page by page, only what was asked for."""

from datetime import UTC, datetime, timedelta

import pytest

from romancy.storage import (
    ANY,
    InvalidPageTokenError,
    ListInstancesOptions,
    SearchTimeoutError,
    SQLStorage,
    WorkflowStatus,
)
from tests.harness import Harness
from tests.numbers import joined, numbers

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


async def listed(storage: SQLStorage, **options: object) -> list[str]:
    page = await storage.list_instances(ListInstancesOptions(**options))  # type: ignore[arg-type]
    return [instance.instance_id for instance in page.instances]


async def all_pages(storage: SQLStorage, limit: int) -> list[list[str]]:
    pages: list[list[str]] = []
    token: str | None = None
    while True:
        page = await storage.list_instances(ListInstancesOptions(limit=limit, page_token=token))
        pages.append([instance.instance_id for instance in page.instances])
        token = page.next_page_token
        if not page.has_more:
            assert token is None
            return pages


async def test_the_newest_come_first_and_ties_are_sorted_byte_for_byte(harness: Harness, storage: SQLStorage) -> None:
    for instance_id in ("b", "B", "a", "ä", "a ", "😀", "\uffee"):
        await harness.instance(storage, instance_id=instance_id, started_at=NOON)
    await harness.instance(storage, instance_id="newest", started_at=NOON + MICROSECOND)
    await harness.instance(storage, instance_id="oldest", started_at=NOON - MICROSECOND)

    assert await listed(storage) == ["newest", "😀", "\uffee", "ä", "b", "a ", "a", "B", "oldest"]


async def test_pages_hold_every_instance_once(harness: Harness, storage: SQLStorage) -> None:
    names = [f"{letter}||{number}" for number in range(3) for letter in "abc"]
    for number, instance_id in enumerate(names):
        await harness.instance(storage, instance_id=instance_id, started_at=NOON + timedelta(seconds=number // 4))

    pages = await all_pages(storage, limit=2)

    assert [len(page) for page in pages] == [2, 2, 2, 2, 1]
    seen = [instance_id for page in pages for instance_id in page]
    assert seen == await listed(storage)
    assert sorted(seen) == sorted(names)


async def test_a_page_that_ends_with_the_last_instance_has_no_successor(harness: Harness, storage: SQLStorage) -> None:
    for _ in range(4):
        await harness.instance(storage)
    assert [len(page) for page in await all_pages(storage, limit=2)] == [2, 2]


async def test_a_page_token_is_a_time_in_utc_and_an_instance_id(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, instance_id="older", started_at=NOON)
    await harness.instance(storage, instance_id="newer||x", started_at=NOON + MICROSECOND)

    page = await storage.list_instances(ListInstancesOptions(limit=1))
    assert page.next_page_token == "2024-05-01T12:00:00.000001+00:00||newer||x"
    for same in ("2024-05-01T12:00:00.000001Z", "2024-05-01T21:00:00.000001+09:00", "2024-05-01 12:00:00.000001"):
        assert await listed(storage, page_token=f"{same}||newer||x") == ["older"]


MALFORMED = (
    "nonsense",
    "||",
    "2024-05-01T12:00:00+00:00",
    "2024-05-01T12:00:00+00:00||",
    "||instance-1",
    "yesterday||instance-1",
    "2024-13-01T12:00:00+00:00||instance-1",
    "2024-05-01T12:00:00+00:00||instance\0-1",
    "2024-05-01T12:00:00+00:00||\ud800",
    "0001-01-01T00:00:00+09:00||instance-1",
)


async def test_a_malformed_page_token_is_refused(storage: SQLStorage) -> None:
    for token in MALFORMED:
        with pytest.raises(InvalidPageTokenError):
            await storage.list_instances(ListInstancesOptions(page_token=token))


async def test_an_empty_page_token_is_none(harness: Harness, storage: SQLStorage) -> None:
    instance_id = await harness.instance(storage)
    assert await listed(storage, page_token="") == [instance_id]


async def test_a_page_has_fifty_instances_unless_told(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for _ in range(51):
            await harness.instance(storage)
    assert len(await listed(storage)) == 50
    assert len(await listed(storage, limit=0)) == 50
    assert len(await listed(storage, limit=51)) == 51
    with pytest.raises(ValueError, match="negative"):
        await listed(storage, limit=-1)


async def test_payloads_are_read_only_when_asked_for(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, input_data='{"big": 1}', output_data='{"bigger": 2}')

    (lean,) = (await storage.list_instances()).instances
    assert (lean.input_data, lean.output_data) == (None, None)
    (full,) = (await storage.list_instances(payloads=True)).instances
    assert (full.input_data, full.output_data) == ('{"big": 1}', '{"bigger": 2}')


async def test_a_listed_instance_is_the_one_that_get_instance_returns(harness: Harness, storage: SQLStorage) -> None:
    lock = await harness.locked(storage, owner_service="orders", current_activity_id="pack:1")
    (listed_instance,) = (await storage.list_instances(payloads=True)).instances
    assert listed_instance == await storage.get_instance(lock.instance_id)


async def test_only_our_framework_is_listed_unless_told(harness: Harness, storage: SQLStorage) -> None:
    for name in ("romancy-py", "python", "go"):
        await harness.instance(storage, instance_id=name, framework=name, started_at=NOON)

    assert await listed(storage) == ["romancy-py"]
    theirs = await storage.list_instances(framework="python")
    assert [instance.instance_id for instance in theirs.instances] == ["python"]
    everybodys = await storage.list_instances(framework=ANY)
    assert [instance.instance_id for instance in everybodys.instances] == ["romancy-py", "python", "go"]


async def test_filters_combine(harness: Harness, storage: SQLStorage) -> None:
    wanted = await harness.instance(
        storage, workflow_name="fulfil", status=WorkflowStatus.FAILED, input_data='{"n": 1}', started_at=NOON
    )
    same = {"workflow_name": "fulfil", "status": WorkflowStatus.FAILED, "input_data": '{"n": 1}', "started_at": NOON}
    await harness.instance(storage, **{**same, "workflow_name": "refund"})
    await harness.instance(storage, **{**same, "status": WorkflowStatus.RUNNING})
    await harness.instance(storage, **{**same, "input_data": '{"n": 2}'})
    await harness.instance(storage, **{**same, "started_at": NOON + timedelta(hours=1)})

    found = await listed(
        storage,
        status_filter=WorkflowStatus.FAILED,
        workflow_name_filter="ful",
        instance_id_filter=wanted[-3:],
        started_after=NOON - MICROSECOND,
        started_before=NOON + MICROSECOND,
        input_filters={"n": 1},
    )
    assert found == [wanted]


async def test_the_time_filters_are_strict(harness: Harness, storage: SQLStorage) -> None:
    for name, moment in (("before", NOON - MICROSECOND), ("noon", NOON), ("after", NOON + MICROSECOND)):
        await harness.instance(storage, instance_id=name, started_at=moment)

    assert await listed(storage, started_after=NOON) == ["after"]
    assert await listed(storage, started_before=NOON) == ["before"]
    assert await listed(storage, started_after=NOON.astimezone(), started_before=NOON.astimezone()) == []


NAMES = ("100% sure", "100 percent sure", "under_score", "underXscore", "back\\slash", "O'Brien", 'say "hi"', "Éclair")


FOUND = {
    "%": ["100% sure"],
    "_": ["under_score"],
    "\\": ["back\\slash"],
    "'": ["O'Brien"],
    '"': ['say "hi"'],
    "SURE": ["100 percent sure", "100% sure"],
    "o'bRIEN": ["O'Brien"],
    "Éc": ["Éclair"],
    "éc": [],
    "eclair": [],
    "'; DROP TABLE workflow_instances; --": [],
    "%s": [],
    "$1": [],
    ":limit": [],
    "\0": [],
    "\ud800": [],
    "": sorted(NAMES),
}


@pytest.mark.parametrize("option", ["workflow_name_filter", "instance_id_filter"])
async def test_a_text_filter_is_a_literal_substring_whose_ascii_letters_ignore_case(
    harness: Harness, storage: SQLStorage, option: str
) -> None:
    async with storage.transaction():
        for name in NAMES:
            await harness.instance(storage, instance_id=name, workflow_name=name, started_at=NOON)

    assert {text: sorted(await listed(storage, **{option: text})) for text in FOUND} == FOUND


async def test_an_unknown_framework_has_no_instances(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage)
    for framework in ("Romancy-py", "romancy-py ", "%", "'"):
        assert (await storage.list_instances(framework=framework)).instances == []


async def test_ids_are_found_by_how_they_begin_byte_for_byte(harness: Harness, storage: SQLStorage) -> None:
    names = ("a", "A", "ab", "a b", "b", "%", "a%", "aé", "a\U0010ffff", "a\ud7ff", "a\ue000", "é")
    for name in names:
        await harness.instance(storage, instance_id=name, started_at=NOON)

    for prefix in (
        "a",
        "A",
        "a ",
        "ab",
        "%",
        "aé",
        "a\U0010ffff",
        "\U0010ffff",
        "a\ud7ff",
        "é",
        "none",
        "\0",
        "\ud800",
    ):
        expected = sorted(name for name in names if name.startswith(prefix))
        assert sorted(await listed(storage, instance_id_prefix=prefix)) == expected, prefix
    assert await listed(storage, instance_id_prefix="a", instance_id_filter="B") == ["ab", "a b"]


async def test_a_beginning_that_many_ids_have_is_paged_like_any_other(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for number in range(205):
            await harness.instance(storage, instance_id=f"many-{number:03}", started_at=NOON + timedelta(number))
        await harness.instance(storage, instance_id="other", started_at=NOON + timedelta(300))

    options = ListInstancesOptions(limit=200, instance_id_prefix="many-")
    first = await storage.list_instances(options)
    rest = await listed(storage, limit=200, instance_id_prefix="many-", page_token=first.next_page_token)

    assert first.instances[0].instance_id == "many-204"
    assert rest == [f"many-{number:03}" for number in (4, 3, 2, 1, 0)]


async def test_names_are_merged_into_one_order_however_many_match(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for number in range(40):
            name = f"flow-{number % 20}" if number >= 20 else f"work-{number % 3}"
            await harness.instance(
                storage, instance_id=f"i-{number:02}", workflow_name=name, started_at=NOON + timedelta(number)
            )

    assert await listed(storage, workflow_name_filter="WORK") == [f"i-{number:02}" for number in range(19, -1, -1)]
    assert await listed(storage, workflow_name_filter="flow") == [f"i-{number:02}" for number in range(39, 19, -1)]
    assert await listed(storage, workflow_name_filter="nothing") == []


async def test_a_search_that_takes_too_long_is_given_up_and_nothing_else_is(
    harness: Harness, storage: SQLStorage
) -> None:
    deep = "[" * 90 + "]" * 90
    async with storage.transaction(deadline_sec=60) as conn:
        await harness.instance(storage, instance_id="i", workflow_name="w", input_data="{}")
        columns = "workflow_name, source_hash, owner_service, framework, status"
        instance_id = joined(storage.runner.driver, "'i-'", "n")
        await conn.execute(
            f"INSERT INTO workflow_instances (instance_id, {columns}, input_data) SELECT {instance_id}, {columns},"
            f" '{{\"a\": {deep}}}' FROM workflow_instances CROSS JOIN {numbers(60_000)}"
        )
    storage.search_timeout_sec = 0.002

    for hopeless in ({"input_filters": {"b": 1}}, {"instance_id_filter": "nothing"}):
        with pytest.raises(SearchTimeoutError, match="declare_input_path"):
            await listed(storage, **hopeless)

    storage.search_timeout_sec = 10
    assert len(await listed(storage)) == 50
    assert await listed(storage, instance_id_filter="nothing") == []


@pytest.mark.databases("mariadb", "mysql")  # whose own limit is in milliseconds, of which none means no limit
async def test_a_search_is_limited_however_little_of_its_time_is_left(storage: SQLStorage) -> None:
    assert await listed(storage) == []  # from its first connection on, the driver knows which of the two it is

    limited = storage.runner.driver.bounded("SELECT workflow_name FROM workflow_definitions", 0.0001)

    assert "max_statement_time = 0.001 FOR" in limited or "MAX_EXECUTION_TIME(1)" in limited
    assert await storage.conn().fetch_all(limited) == []
