"""Input filters: exact match with JSON types, the same on every database, and no row can make a listing fail."""

import json
from typing import Any

import pytest

from romancy.storage import (
    ANY,
    InputFilterBuilder,
    InvalidJSONPathError,
    ListInstancesOptions,
    SQLStorage,
    new_driver,
    validate_json_path,
)
from tests.harness import Harness

# The path.


@pytest.mark.parametrize("path", ["a", "_", "A1", "order.customer.id", "_a._1.__", "a" * 255])
def test_a_path_is_made_of_identifiers_joined_by_dots(path: str) -> None:
    validate_json_path(path)


NO_PATHS = [
    *("", ".", "a.", ".a", "a..b", "1a", "a-b", "a b", "a\n", "\na", "$.a", "a[0]", "a'b", 'a"b', "a;b", "a\0", "a%"),
    *("a'); DROP TABLE workflow_instances; --", "a.*", "**", "{a}", "a,b", "ä", "\u0430", "a" * 256),
]


@pytest.mark.parametrize("path", NO_PATHS)
def test_anything_else_is_no_path(path: str) -> None:
    with pytest.raises(InvalidJSONPathError):
        validate_json_path(path)
    with pytest.raises(InvalidJSONPathError):
        InputFilterBuilder(new_driver("sqlite://:memory:")).build_filter_query({path: 1})


async def test_a_listing_refuses_what_is_no_path(storage: SQLStorage) -> None:
    with pytest.raises(InvalidJSONPathError):
        await storage.list_instances(ListInstancesOptions(input_filters={"a'b": 1}))


# The builder.

URLS = ["sqlite://:memory:", "postgresql://localhost/x", "mysql://localhost/x"]


@pytest.mark.parametrize("url", URLS)
def test_a_condition_for_each_filter_and_no_value_in_the_text(url: str) -> None:
    driver = new_driver(url)
    conditions, arguments = InputFilterBuilder(driver).build_filter_query({"a.b": "sesame", "c": 17}, 5)
    assert len(conditions) == 2
    assert "sesame" not in " ".join(conditions)
    assert "17" not in " ".join(conditions)
    assert len(arguments) == 2
    if driver.driver_name() == "postgres":
        assert "$5" in conditions[0]
        assert "$6" in conditions[1]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**30, float("nan"), float("inf"), -float("inf")])
def test_a_number_that_cannot_be_compared_exactly_is_refused(url: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"64 bits|JSON"):
        InputFilterBuilder(new_driver(url)).build_filter_query({"a": value})


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("value", [{}, {"a": 1}, [], [1], b"x", object()])
def test_what_is_no_scalar_is_refused(url: str, value: object) -> None:
    with pytest.raises(TypeError):
        InputFilterBuilder(new_driver(url)).build_filter_query({"a": value})


def test_no_filters_are_no_conditions() -> None:
    assert InputFilterBuilder(new_driver("sqlite://:memory:")).build_filter_query({}) == ([], [])


# What matches.

ROWS = {
    "one": '{"a": 1}',
    "one point zero": '{"a": 1.0}',
    "one, scientific": '{"a": 10e-1}',
    "one as text": '{"a": "1"}',
    "one, then zero": '{"a": 1, "a": 0}',
    "zero, then one": '{"a": 0, "a": 1}',
    "one and a half": '{"a": 1.5}',
    "zero": '{"a": 0}',
    "minus zero": '{"a": -0}',
    "minus zero point zero": '{"a": -0.0}',
    "a tenth": '{"a": 0.1}',
    "true": '{"a": true}',
    "false": '{"a": false}',
    "true as text": '{"a": "true"}',
    "null": '{"a": null}',
    "null as text": '{"a": "null"}',
    "missing": '{"b": 1}',
    "empty": "{}",
    "no text": '{"a": ""}',
    "space": '{"a": " "}',
    "x": '{"a": "x"}',
    "X": '{"a": "X"}',
    "x and space": '{"a": "x "}',
    "x, escaped": '{"a": "\\u0078"}',
    "e acute": '{"a": "é"}',
    "e acute, escaped": '{"a": "\\u00e9"}',
    "e, then acute": '{"a": "e\\u0301"}',
    "emoji": '{"a": "😀"}',
    "emoji, escaped": '{"a": "\\ud83d\\ude00"}',
    "quoted": '{"a": "say \\"hi\\""}',
    "quote": '{"a": "it\'s"}',
    "backslash": '{"a": "\\\\"}',
    "percent": '{"a": "%"}',
    "newline": '{"a": "\\n"}',
    "newline, escaped": '{"a": "\\u000A"}',
    "slash": '{"a": "/"}',
    "slash, escaped": '{"a": "\\/"}',
    "2^53+1 and a point": '{"a": 9007199254740993.0}',
    "2^63-1, scientific": '{"a": 9223372036854775807e0}',
    "almost one": '{"a": 1.00000000000000000000000000000000000000001}',
    "a tenth, at length": '{"a": 0.1000}',
    "almost a tenth": '{"a": 0.1000000000000000055511151231257827}',
    "2^53": '{"a": 9007199254740992}',
    "2^53+1": '{"a": 9007199254740993}',
    "2^63-1": '{"a": 9223372036854775807}',
    "2^63": '{"a": 9223372036854775808}',
    "-2^63": '{"a": -9223372036854775808}',
    "2^64": '{"a": 18446744073709551616}',
    "1e300": '{"a": 1e300}',
    "1e-300": '{"a": 1e-300}',
    "object": '{"a": {}}',
    "array": '{"a": [1]}',
    "nested": '{"a": {"b": {"c": 1}}}',
    "nested text": '{"a": {"b": "x"}}',
    "nested, then not": '{"a": {"b": 1}, "a": 5}',
    "key with a dot": '{"a.b": 1}',
    "other case": '{"A": 1}',
    "array of objects": '[{"a": 1}]',
    "number": "1",
    "text": '"a"',
    "bare null": "null",
    "bare true": "true",
}

NOTHING = {"null", "missing", "empty", "key with a dot", "other case"}
ONE = {"one", "one point zero", "one, scientific", "zero, then one"}

FILTERS: list[tuple[dict[str, Any], set[str]]] = [
    ({"a": 1}, ONE),
    ({"a": 1.0}, ONE),
    ({"a": "1"}, {"one as text"}),
    ({"a": 1.5}, {"one and a half"}),
    ({"a": 0}, {"zero", "minus zero", "minus zero point zero", "one, then zero"}),
    ({"a": -0.0}, {"zero", "minus zero", "minus zero point zero", "one, then zero"}),
    ({"a": 0.1}, {"a tenth", "a tenth, at length"}),
    ({"a": True}, {"true"}),
    ({"a": False}, {"false"}),
    ({"a": "true"}, {"true as text"}),
    ({"a": None}, NOTHING),
    ({"a": "null"}, {"null as text"}),
    ({"b": 1}, {"missing"}),
    ({"a": ""}, {"no text"}),
    ({"a": " "}, {"space"}),
    ({"a": "x"}, {"x", "x, escaped"}),
    ({"a": "X"}, {"X"}),
    ({"a": "x "}, {"x and space"}),
    ({"a": "é"}, {"e acute", "e acute, escaped"}),
    ({"a": "e\u0301"}, {"e, then acute"}),
    ({"a": "e"}, set()),
    ({"a": "😀"}, {"emoji", "emoji, escaped"}),
    ({"a": 'say "hi"'}, {"quoted"}),
    ({"a": "it's"}, {"quote"}),
    ({"a": "\\"}, {"backslash"}),
    ({"a": "%"}, {"percent"}),
    ({"a": "\n"}, {"newline", "newline, escaped"}),
    ({"a": "/"}, {"slash", "slash, escaped"}),
    ({"a": "\\n"}, set()),
    ({"a": 2**53}, {"2^53"}),
    ({"a": 2**53 + 1}, {"2^53+1", "2^53+1 and a point"}),
    ({"a": float(2**53)}, {"2^53"}),
    ({"a": 2**63 - 1}, {"2^63-1", "2^63-1, scientific"}),
    ({"a": -(2**63)}, {"-2^63"}),
    ({"a": 1e300}, {"1e300"}),
    ({"a": 1e-300}, {"1e-300"}),
    ({"a.b": 1}, set()),
    ({"a.b": "x"}, {"nested text"}),
    ({"a.b.c": 1}, {"nested"}),
    ({"a.b.c.d": 1}, set()),
    ({"A": 1}, {"other case"}),
    ({"a": 1, "b": None}, ONE),
    ({"a": 1, "b": 1}, set()),
]


async def found(storage: SQLStorage, filters: dict[str, Any]) -> set[str]:
    page = await storage.list_instances(ListInstancesOptions(limit=1000, input_filters=filters), framework=ANY)
    return {instance.instance_id for instance in page.instances}


async def test_a_filter_matches_the_same_json_on_every_database(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for name, text in ROWS.items():
            await harness.instance(storage, instance_id=name, input_data=text)

    wrong = {}
    for filters, expected in FILTERS:
        got = await found(storage, filters)
        if got != expected:
            wrong[repr(filters)] = {"missed": expected - got, "wrongly found": got - expected}
    assert wrong == {}


async def test_a_missing_path_is_null_at_every_depth_of_an_object_only(harness: Harness, storage: SQLStorage) -> None:
    for name in ("nested", "one", "null", "empty", "array", "array of objects", "number", "bare null"):
        await harness.instance(storage, instance_id=name, input_data=ROWS[name])
    assert await found(storage, {"a.b.x": None}) == {"nested", "one", "null", "empty", "array"}


async def test_filters_work_across_pages(harness: Harness, storage: SQLStorage) -> None:
    async with storage.transaction():
        for number in range(30):
            await harness.instance(
                storage, instance_id=f"i-{number:02}", input_data=json.dumps({"even": number % 2 == 0})
            )
    seen: list[str] = []
    token = None
    while True:
        options = ListInstancesOptions(limit=4, page_token=token, input_filters={"even": True})
        page = await storage.list_instances(options)
        seen += [instance.instance_id for instance in page.instances]
        assert all(instance.input_data is None for instance in page.instances)
        token = page.next_page_token
        if token is None:
            break
        assert len(page.instances) == 4
    assert sorted(seen) == [f"i-{number:02}" for number in range(0, 30, 2)]


async def test_a_value_beyond_64_bits_is_refused_by_the_listing(storage: SQLStorage) -> None:
    for value in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match="64 bits"):
            await found(storage, {"a": value})


# Odd rows.

ODD = {
    "empty text": "",
    "no JSON": "not json",
    "half": '{"a": 1',
    "python": "{'a': 1}",
    "NaN": '{"a": NaN}',
    "trailing": '{"a": 1} x',
    "two": '{"a": 1}{"a": 1}',
    "leading zero": '{"a": 01}',
    "bare minus": '{"a": -}',
    "lone dot": '{"a": 1.}',
    "tab in text": '{"a": 1, "b": "\t"}',
    "escape": '{"a": 1, "b": "\\x"}',
    "deep garbage": "[" * 200_000,
    "deep array": "[" * 5000 + "]" * 5000,
    "deep object": '{"a":' * 5000 + "1" + "}" * 5000,
    "text": "1e400",
    "blank": " ",
    "half a pair": '{"a": 1, "b": "\\ud800"}',
    "byte order mark": '\ufeff{"a": 1}',
}
"""What another framework, or a hand, may have left in the table: none of it is a JSON object with ``a`` = 1."""


async def leave(storage: SQLStorage, rows: dict[str, str]) -> None:
    """Put rows into the table as somebody else would, past all checks."""
    conn = storage.conn()
    async with storage.transaction():
        await conn.execute(
            "INSERT INTO workflow_definitions (workflow_name, source_hash, source_code) VALUES ('w', '', '')"
        )
        for name, text in rows.items():
            await conn.execute(
                "INSERT INTO workflow_instances"
                " (instance_id, workflow_name, source_hash, owner_service, framework, status, input_data)"
                " VALUES (:name, 'w', '', '', 'python', 'running', :text)",
                name=name,
                text=text,
            )


async def test_no_row_can_make_a_listing_fail(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, instance_id="good", input_data='{"a": 1}')
    await leave(storage, ODD)
    assert await found(storage, {"a": 1}) == {"good"}
    assert await found(storage, {"a": "1"}) == set()
    assert await found(storage, {"a": True}) == set()
    assert await found(storage, {"a": 1.5}) == set()
    assert await found(storage, {"a.a.a": 1}) == set()


HARD = {
    "deep beside": '{"a": 1, "b": ' + "[" * 300 + "]" * 300 + "}",
    "below": '{"a": 1, "b": ' + '{"a": ' * 150 + "2" + "}" * 150 + "}",
    "wide": '{"a": 1, "b": [' + ",".join(["{}"] * 2000) + "]}",
    "NUL beside": '{"a": 1, "b": "\\u0000"}',
    "NUL key": '{"a": 1, "\\u0000": 1}',
    "huge number beside": '{"a": 1, "b": 1e400}',
    "many digits beside": '{"a": 1, "b": ' + "9" * 5000 + "}",
    "many decimals": '{"a": 1.' + "0" * 400 + "}",
    "brackets in text": '{"a": 1, "b": "' + "[" * 5000 + '"}',
    "slash beside": '{"a": 1, "b": "\\/"}',
    "duplicate keys": '{"a": "x", "b": {"a": 2}, "a": 2, "a": 1}',
    "space": ' \n\t{ "a" :\r\n1 } \n',
    "key escaped": '{"\\u0061": 1}',
}
"""JSON that is hard on a database's own functions; in all of them ``a`` = 1."""


async def test_hard_json_is_read_like_any_other(harness: Harness, storage: SQLStorage) -> None:
    await leave(storage, HARD)
    got = await found(storage, {"a": 1})
    assert {"missed": set(HARD) - got} == {"missed": set()}
    assert await found(storage, {"a": 2}) == set()
    assert await found(storage, {"a": None}) == set()


async def test_text_with_a_nul_is_found_by_its_text(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, instance_id="nul", input_data='{"a": "x\\u0000y"}')
    await harness.instance(storage, instance_id="plain", input_data='{"a": "x"}')
    assert await found(storage, {"a": "x\0y"}) == {"nul"}
    assert await found(storage, {"a": "x"}) == {"plain"}
    assert await found(storage, {"a": "\ud800"}) == set()


async def test_nested_duplicate_keys_are_read_from_the_last_one(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(
        storage, instance_id="one", input_data='{"a": {"b": 1, "b": 2}, "a": {"c": 3, "b": 4, "b": 5}}'
    )
    await harness.instance(storage, instance_id="two", input_data='{"a": {"b": 5}, "a": {"c": 3}}')
    assert await found(storage, {"a.b": 5}) == {"one"}
    assert await found(storage, {"a.b": 1}) == set()
    assert await found(storage, {"a.b": None}) == {"two"}


@pytest.mark.databases("postgres")
async def test_a_filter_works_in_a_parallel_plan(harness: Harness, storage: SQLStorage) -> None:
    """PostgreSQL chooses one for large tables, and its workers cannot catch errors."""
    async with storage.transaction() as conn:
        for number in range(300):
            await harness.instance(storage, input_data=json.dumps({"a": number % 2}))
        for setting in ("parallel_setup_cost = 0", "parallel_tuple_cost = 0", "min_parallel_table_scan_size = 0"):
            await conn.execute(f"SET LOCAL {setting}")
        await conn.execute("SET LOCAL enable_indexscan = off")
        assert len(await found(storage, {"a": 1})) == 150


@pytest.mark.databases("sqlite")
async def test_what_is_no_text_at_all_does_not_match(harness: Harness, storage: SQLStorage) -> None:
    """SQLite keeps any value in any column."""
    await leave(storage, {"bytes": "", "number": "", "no utf-8": ""})
    for name, value in (("bytes", "x'ff00'"), ("number", "1"), ("no utf-8", "CAST(x'7b2261223a2231ff227d' AS TEXT)")):
        await storage.conn().execute(f"UPDATE workflow_instances SET input_data = {value} WHERE instance_id = '{name}'")
    await harness.instance(storage, instance_id="good", input_data='{"a": 1}')
    assert await found(storage, {"a": 1}) == {"good"}


async def test_many_rows_that_the_database_cannot_judge_do_not_hide_one_that_matches(
    harness: Harness, storage: SQLStorage
) -> None:
    await harness.instance(storage, instance_id="oldest", input_data='{"a": 1}')
    harness.advance(seconds=1)
    async with storage.transaction():
        for number in range(120):
            deep = "[" * 150 + "]" * 150
            await harness.instance(storage, instance_id=f"i-{number}", input_data=f'{{"a": 2, "b": {deep}}}')
    page = await storage.list_instances(ListInstancesOptions(limit=1, input_filters={"a": 1}))
    assert [instance.instance_id for instance in page.instances] == ["oldest"]
    assert page.has_more is False


# Declared paths.


async def test_a_declared_path_finds_the_same_as_a_search(harness: Harness, storage: SQLStorage) -> None:
    for path in ("a", "a.b", "a.b.c"):
        await storage.declare_input_path(path)
    try:
        async with storage.transaction():
            for name, text in ROWS.items():
                await harness.instance(storage, instance_id=name, input_data=text)
        wrong = {}
        for filters, expected in FILTERS:
            got = await found(storage, filters)
            if got != expected:
                wrong[repr(filters)] = {"missed": expected - got, "wrongly found": got - expected}
        assert wrong == {}
    finally:
        for path in await storage.declared_input_paths():
            await storage.forget_input_path(path)


async def test_no_index_of_ours_makes_an_insert_fail(harness: Harness, storage: SQLStorage) -> None:
    await storage.declare_input_path("a")
    try:
        long = {"long": '{"a": "' + "x" * 100_000 + '"}', "number": '{"a": ' + "9" * 5000 + "}"}
        await leave(storage, ODD | HARD | long)
        await harness.instance(storage, instance_id="good", input_data='{"a": 1}')
        assert await found(storage, {"a": 1}) == {"good", *HARD}
        assert await found(storage, {"a": "x" * 100_000}) == {"long"}
        assert await found(storage, {"a": "x" * 99_999}) == set()
    finally:
        await storage.forget_input_path("a")


async def test_what_was_there_before_a_path_was_declared_is_found(harness: Harness, storage: SQLStorage) -> None:
    await harness.instance(storage, instance_id="early", input_data='{"order": {"id": "o-1"}}')
    await storage.declare_input_path("order.id")
    await storage.declare_input_path("order.id")
    try:
        await harness.instance(storage, instance_id="late", input_data='{"order": {"id": "o-1"}}')
        await harness.instance(storage, instance_id="other", input_data='{"order": {"id": "o-2"}}')
        assert await storage.declared_input_paths() == ["order.id"]
        assert await found(storage, {"order.id": "o-1"}) == {"early", "late"}
    finally:
        await storage.forget_input_path("order.id")
    assert await storage.declared_input_paths() == []
    assert await found(storage, {"order.id": "o-1"}) == {"early", "late"}
