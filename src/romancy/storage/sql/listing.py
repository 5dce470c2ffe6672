"""Listing: newest first, each page through the index that holds it in order, however many instances there are.

What an index cannot hold together (several names, all frameworks) is read as several pages of one index each and
merged: names and frameworks are few. What no index can answer, a part of an id or an input path that was never
declared, is searched for, newest first, for a bounded time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any, NamedTuple

import msgspec

from ..errors import InvalidPageTokenError, SearchTimeoutError
from ..input_filters import InputFilterBuilder, check_filter_value, input_matches, validate_json_path
from ..models import (
    AnyFramework,
    ListInstancesOptions,
    PaginationResult,
    WorkflowInstance,
    WorkflowStatus,
)
from .checks import can_be_stored, check_key, page_size
from .drivers.driver import Driver
from .ending import Ending
from .operation import operation
from .statement import FRAGMENTS, NativeQuery, Want, row_decoder, sql

SEARCH_TIMEOUT_SEC = 10.0
_JUDGED_AT_ONCE = 100
_MOST_BRANCHES = 16
"""How many pages are merged at most; where more would be needed, the newest are read through."""
_FEW_IDS = 200
"""How many ids of a prefix are fetched and sorted; where there are more, the newest are read through."""

Given = Callable[[Any], str]
"""Take an argument; the placeholder for it."""


class Branch(NamedTuple):
    """A part of the instances that one index holds in the order of pages."""

    through: str
    """The name of the index."""
    conditions: Sequence[Callable[[Given], str]]


class Listing(Ending):
    """Implements the listing of `InstanceManager`."""

    search_timeout_sec: float = SEARCH_TIMEOUT_SEC
    """How long a listing may search."""

    _next_framework = sql("SELECT MIN(framework) FROM workflow_instances WHERE framework > :framework")

    _declared = sql("SELECT path FROM romancy_input_paths WHERE {in:path, paths} ORDER BY path")

    @operation(reads=True)
    async def list_instances(
        self,
        options: ListInstancesOptions | None = None,
        *,
        payloads: bool = False,
        framework: str | AnyFramework | None = None,
    ) -> PaginationResult:
        options = options or ListInstancesOptions()
        wanted = page_size(options.limit, default=50)
        check_options(options)
        search = Search(self.runner.driver, self.search_timeout_sec)
        branches = await self._branches(options, framework or self.framework, search)
        if not branches:
            return PaginationResult([])
        if options.input_filters and not self.runner.driver.json_is_exact:
            found = await self._judged(options, wanted + 1, branches, search, payloads=payloads)
        else:
            columns = "instance_columns" if payloads else "listed_columns"
            found = await self._listed(options, wanted + 1, branches, search, columns)
        has_more = len(found) > wanted
        token = page_token(found[wanted - 1]) if has_more else None
        return PaginationResult(found[:wanted], token, has_more)

    async def _judged(
        self,
        options: ListInstancesOptions,
        wanted: int,
        branches: Sequence[Branch],
        search: Search,
        *,
        payloads: bool,
    ) -> list[WorkflowInstance]:
        """Read on, a batch at a time, until enough are found: SQL lets some pass that do not match."""
        found: list[WorkflowInstance] = []
        size = max(wanted, _JUDGED_AT_ONCE)
        columns = "instance_columns" if payloads else "judged_columns"
        while len(found) < wanted:
            batch: list[WorkflowInstance] = await self._listed(options, size, branches, search, columns)
            matching = [instance for instance in batch if input_matches(instance.input_data, options.input_filters)]
            found += matching if payloads else [msgspec.structs.replace(one, input_data=None) for one in matching]
            if len(batch) < size:
                break
            options = msgspec.structs.replace(options, page_token=page_token(batch[-1]))
        return found[:wanted]

    # Which index.

    async def _branches(
        self, options: ListInstancesOptions, framework: str | AnyFramework, search: Search
    ) -> list[Branch]:
        """The parts of the table that the page is merged from; none where nothing can match."""
        if isinstance(framework, AnyFramework):
            frameworks = await self._frameworks()
        else:
            frameworks = [check_key("framework", framework)]
        driver = self.runner.driver

        def equal(column: str, value: str) -> Sequence[Callable[[Given], str]]:
            return [lambda given: f"{column} = {driver.unforeseen(given(value))}"]

        kinds = [equal("i.framework", name) for name in frameworks]
        if options.instance_id_prefix:
            ids = await self._ids(options.instance_id_prefix, search)
            if ids is not None:
                return [Branch("PRIMARY", (among("i.instance_id", ids),))] if ids else []
        if path := await self._declared_path(options):
            buckets = driver.input_buckets(path, options.input_filters[path])
            keys = [compared(driver.input_key("i.", path), bucket.comparison, bucket.argument) for bucket in buckets]
            return _merged(driver.input_index(path), kinds, [[key] for key in keys])
        if options.workflow_name_filter:
            names = await self._names(options.workflow_name_filter, search)
            few = len(names) * len(frameworks) <= _MOST_BRANCHES
            # Few of those that have not completed are kept waiting behind others of their status.
            if not names or (few and options.status_filter in (None, WorkflowStatus.COMPLETED)):
                return _merged("romancy_instances_by_name", kinds, [equal("i.workflow_name", name) for name in names])
        if options.status_filter is not None:
            status = equal("i.status", str(WorkflowStatus(options.status_filter)))
            return _merged("romancy_instances_by_status", kinds, [status])
        return _merged("romancy_instances_newest", kinds, [[]])

    async def _frameworks(self) -> list[str]:
        """All that have instances: one step in the index for each, not a look at every instance."""
        found: list[str] = []
        while (name := await self._next_framework.value(framework=found[-1] if found else "")) is not None:
            found.append(name)
        return found

    async def _declared_path(self, options: ListInstancesOptions) -> str | None:
        if not options.input_filters:
            return None
        found = await self._declared.one(paths=list(options.input_filters))
        return None if found is None else str(found[0])

    async def _names(self, text: str, search: Search) -> list[str]:
        """The names of workflows that contain a text, of which there are few: one more than can be merged, at most."""
        if not can_be_stored(text):
            return []
        arguments, given = taking(self.runner.driver)
        query = (
            "SELECT DISTINCT workflow_name FROM workflow_definitions"
            f" WHERE {self._contains('workflow_name', text, given)} LIMIT {_MOST_BRANCHES + 1}"
        )
        return [name for (name,) in await search.all(query, arguments)]

    async def _ids(self, prefix: str, search: Search) -> list[str] | None:
        """The ids that begin so, None if there are many."""
        if not can_be_stored(prefix):
            return []
        arguments, given = taking(self.runner.driver)
        key = self.runner.driver.byte_order("i.instance_id")
        query = (
            f"SELECT i.instance_id FROM workflow_instances i WHERE {begins(key, prefix, given)}"
            f" ORDER BY {key} LIMIT {_FEW_IDS + 1}"
        )
        ids = [instance_id for (instance_id,) in await search.all(query, arguments)]
        return ids if len(ids) <= _FEW_IDS else None

    def _contains(self, column: str, text: str, given: Given) -> str:
        driver = self.runner.driver
        needle = driver.ascii_lower(f"CAST({given(text)} AS {driver.text_type})")
        return driver.position(needle, driver.ascii_lower(column)) + " > 0"

    # The page.

    async def _listed(
        self,
        options: ListInstancesOptions,
        limit: int,
        branches: Sequence[Branch],
        search: Search,
        columns: str,
    ) -> list[WorkflowInstance]:
        """As one statement; only the filters that were given are in it, so that it can use their index."""
        driver = self.runner.driver
        arguments, given = taking(driver)
        selected = driver.expand(FRAGMENTS[columns])
        started = driver.make_datetime_comparable("i.started_at")
        ordered = f"ORDER BY {started} DESC, {driver.byte_order('i.instance_id')} DESC LIMIT {limit:d}"
        pages = []
        for branch in branches:
            conditions = [condition(given) for condition in branch.conditions]
            conditions += self._filters(options, branch, given, arguments)
            pages.append(
                f"SELECT {selected} FROM workflow_instances i {driver.through_index(branch.through)}"
                f" WHERE {' AND '.join(conditions)} {ordered}"
            )
        text = pages[0]
        if len(pages) > 1:
            merged = " UNION ALL ".join(f"SELECT * FROM ({page}) page{n}" for n, page in enumerate(pages))
            text = f"SELECT * FROM ({merged}) i {ordered}"
        found: list[WorkflowInstance] = await search.all(text, arguments, row_decoder(WorkflowInstance, driver))
        return found

    def _filters(
        self, options: ListInstancesOptions, branch: Branch, given: Given, arguments: list[Any]
    ) -> Iterator[str]:
        """What the branch does not answer yet; none of it may choose another index."""
        driver = self.runner.driver
        if options.status_filter is not None and branch.through != "romancy_instances_by_status":
            yield f"{driver.hidden('i.status')} = {given(str(WorkflowStatus(options.status_filter)))}"
        for column, text in (
            ("i.workflow_name", options.workflow_name_filter),
            ("i.instance_id", options.instance_id_filter),
        ):
            if text:
                yield self._contains(column, text, given) if can_be_stored(text) else "1 = 0"
        key = driver.byte_order("i.instance_id")
        if options.instance_id_prefix:
            yield begins(driver.byte_order(driver.hidden("i.instance_id")), options.instance_id_prefix, given)
        started = driver.make_datetime_comparable("i.started_at")
        if options.started_after is not None:
            yield f"{started} > {given(driver.encode_time(options.started_after))}"
        if options.started_before is not None:
            yield f"{started} < {given(driver.encode_time(options.started_before))}"
        if options.page_token:
            started_at, instance_id = read_page_token(options.page_token)
            moment = driver.encode_time(started_at)
            yield f"({started} < {given(moment)} OR ({started} = {given(moment)} AND {key} < {given(instance_id)}))"
            yield f"{started} <= {given(moment)}"  # what an index can start from
        if options.input_filters:
            filters, more = InputFilterBuilder(driver, column="i.input_data").build_filter_query(
                options.input_filters, len(arguments) + 1
            )
            arguments.extend(more)
            yield from filters


class Search:
    """The statements of one listing, which end together."""

    def __init__(self, driver: Driver, timeout_sec: float) -> None:
        self._driver = driver
        self._timeout_sec = timeout_sec
        self._deadline = time.monotonic() + timeout_sec

    def all(self, text: str, arguments: Sequence[Any], decode: Any = None) -> NativeQuery[Any]:
        """A statement that is given up when the time for all of them is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SearchTimeoutError
        return NativeQuery(self._driver.bounded(text, left), arguments, Want.ALL, decode, within_sec=left)


def check_options(options: ListInstancesOptions) -> None:
    """Refuse what cannot be asked for, whatever there is to be found."""
    for path, value in options.input_filters.items():
        validate_json_path(path)
        check_filter_value(value)
    if options.page_token:
        read_page_token(options.page_token)


def _merged(index: str, *parts: Sequence[Sequence[Callable[[Given], str]]]) -> list[Branch]:
    """A branch for each choice of one of each part."""
    return [Branch(index, [condition for part in choice for condition in part]) for choice in product(*parts)]


def taking(driver: Driver) -> tuple[list[Any], Given]:
    """A list of arguments, and the function that fills it."""
    arguments: list[Any] = []

    def given(value: Any) -> str:
        arguments.append(value)
        return driver.placeholder(len(arguments))

    return arguments, given


def compared(expression: str, comparison: str, value: Any) -> Callable[[Given], str]:
    """An expression compared with a value, where the comparison needs one."""
    return lambda given: f"{expression} {comparison.format(given(value)) if '{0}' in comparison else comparison}"


def among(column: str, values: Sequence[Any]) -> Callable[[Given], str]:
    """A column is one of a few values."""
    return lambda given: f"{column} IN ({', '.join(given(value) for value in values)})"


def begins(key: str, prefix: str, given: Given) -> str:
    """A key begins with a text, as a range of the index."""
    lower = f"{key} >= {given(prefix)}"
    end = after_all_with(prefix)
    return lower if end is None else f"{lower} AND {key} < {given(end)}"


def after_all_with(prefix: str) -> str | None:
    """The smallest text after all that begin with `prefix`, byte for byte; None where there is none."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    following = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if following == 0xD800 else following)


def page_token(instance: WorkflowInstance) -> str:
    """Where the page ended: ``ISO_DATETIME||INSTANCE_ID``."""
    assert instance.started_at is not None, "a stored instance has a start"
    return f"{instance.started_at.isoformat(timespec='microseconds')}||{instance.instance_id}"


def read_page_token(token: str) -> tuple[datetime, str]:
    """Take a page token apart; a time without a zone is UTC."""
    moment, separator, instance_id = token.partition("||")
    try:
        if not separator or not instance_id or not can_be_stored(instance_id):
            raise ValueError("there is no ||INSTANCE_ID")
        started_at = datetime.fromisoformat(moment)
        if started_at.tzinfo is None:
            started_at = started_at.replace(tzinfo=UTC)
        return started_at.astimezone(UTC), instance_id
    except (ValueError, OverflowError) as error:
        raise InvalidPageTokenError(f"not a page token (ISO_DATETIME||INSTANCE_ID): {token!r}: {error}") from error
