"""Database URLs: what they may look like, and that no message ever shows a password."""

import sys
import traceback
from typing import Any

import pytest

from romancy.storage import (
    InvalidURLError,
    MissingDriverError,
    MySQLStorage,
    PostgresStorage,
    SQLiteStorage,
    open_storage,
)
from romancy.storage.sql.runners.mysql import ssl_context
from romancy.storage.sql.runners.postgres import ssl_mode
from romancy.storage.urls import parse_url

UNDERSTOOD = [
    ("sqlite:///orders.db", {"kind": "sqlite", "database": "orders.db"}),
    ("sqlite:////var/lib/orders.db", {"database": "/var/lib/orders.db"}),
    ("sqlite:///my%20orders.db?synchronous=normal", {"database": "my orders.db", "options": {"synchronous": "normal"}}),
    ("sqlite://:memory:", {"database": ":memory:"}),
    ("sqlite:///:memory:", {"database": ":memory:"}),
    ("sqlite:orders.db", {"database": "orders.db"}),
    (":memory:", {"kind": "sqlite", "database": ":memory:"}),
    ("/var/lib/100%25?.db", {"kind": "sqlite", "database": "/var/lib/100%25?.db", "options": {}}),
    ("postgres://db/orders", {"kind": "postgres", "host": "db", "port": 5432, "user": "", "password": ""}),
    ("postgresql://ann:pw@db:5433/orders", {"port": 5433, "user": "ann", "password": "pw", "database": "orders"}),
    ("POSTGRESQL://db/orders", {"kind": "postgres"}),
    ("postgres://ann:p%40s%2Fs%3A%23%25@db/orders", {"password": "p@s/s:#%"}),
    ("postgres://ann%40corp:pw@db/orders", {"user": "ann@corp"}),
    ("postgres://ann:a@b@db/orders", {"user": "ann", "password": "a@b", "host": "db"}),
    ("postgres://ann:p+w@db/orders", {"password": "p+w"}),
    ("postgres://ann:@db/orders", {"user": "ann", "password": ""}),
    ("postgres://[::1]:5433/orders", {"host": "::1", "port": 5433}),
    ("postgres:///orders?host=/Var/run&port=5433", {"host": "/Var/run", "socket": "/Var/run", "port": 5433}),
    ("postgres://%2FVar%2Frun/orders", {"host": "/Var/run"}),
    ("postgres:///?user=ann&password=pw&dbname=orders", {"user": "ann", "password": "pw", "database": "orders"}),
    (
        "postgres://db/orders?sslmode=require&application_name=a+b",
        {"options": {"sslmode": "require", "application_name": "a+b"}},
    ),
    ("mysql://ann:pw@db/orders", {"kind": "mysql", "port": 3306}),
    ("mariadb://ann:pw@db:3307/orders", {"kind": "mysql", "port": 3307}),
    ("mysql://ann@localhost/orders?unix_socket=/run/my.sock", {"socket": "/run/my.sock"}),
    ("ann:pw@tcp(db:3307)/orders", {"kind": "mysql", "user": "ann", "password": "pw", "host": "db", "port": 3307}),
    ("ann:p@s/s:w%40rd@tcp(db:3307)/orders", {"password": "p@s/s:w%40rd"}),
    ("ann@tcp(db)/orders?parseTime=true", {"password": "", "port": 3306, "options": {"parseTime": "true"}}),
    ("ann:pw@tcp([::1]:3307)/orders", {"host": "::1", "port": 3307}),
    ("ann:pw@unix(/run/my.sock)/orders", {"socket": "/run/my.sock", "database": "orders"}),
    ("ann:pw@tcp(db:3306)/orders?back=http://x", {"kind": "mysql", "options": {"back": "http://x"}}),
    ("mysql://ann:pw@tcp(db:3306)/orders", {"user": "ann", "password": "pw", "host": "db"}),
]


@pytest.mark.parametrize(("url", "parts"), UNDERSTOOD)
def test_a_url_is_taken_apart(url: str, parts: dict[str, Any]) -> None:
    parsed = parse_url(url)

    assert {name: getattr(parsed, name) for name in parts} == parts


REFUSED = [
    "",
    "a\0b",
    "sqlite://",
    "oracle://ann:hunter2@db/orders",
    "postgresql+asyncpg://ann:hunter2@db/orders",
    "postgres://ann:hunter2@db:port/orders",
    "postgres://ann:hunter2@db:99999/orders",
    "postgres://ann:hunter2@db:0/orders",
    "postgres:///orders?port=abc&password=hunter2",
    "postgres://ann:hun/hunter2@db/orders",
    "postgres://ann:12/hunter2@db/orders",
    "postgres://ann:12?hunter2@db/orders",
    "postgres://ann:12#hunter2@db/orders",
    "postgres://ann:12@4/hunter2@db/orders",
    "mysql://ann:hunter2@db:3306:3306/orders",
    "ann:hunter2@/orders",
    "ann:hunter2@tcp(db:3306/orders",
    "ann:hunter2@tcp(db:3306)orders",
    "ann:hunter2@tcp(db:port)/orders",
    "ann:hun\nhunter2@tcp(db/orders",
    "ann:hunter2://@tcp/orders",
]


@pytest.mark.parametrize("url", REFUSED)
def test_what_cannot_be_understood_is_refused_without_showing_a_password(url: str) -> None:
    with pytest.raises(InvalidURLError) as caught:
        open_storage(url)

    assert "hunter2" not in "".join(traceback.format_exception(caught.value, chain=True))
    assert caught.value.__context__ is None or "hunter2" not in str(caught.value.__context__)


@pytest.mark.parametrize("url", [url for url, parts in UNDERSTOOD if parts.get("password")])
def test_a_parsed_url_is_shown_without_its_password(url: str) -> None:
    parsed = parse_url(url)

    assert parsed.password not in parsed.shown.replace("postgres", "").replace("mysql", "")
    assert repr(parsed) == f"DatabaseURL({parsed.shown!r})"


@pytest.mark.parametrize(
    ("storage", "url"),
    [
        (SQLiteStorage, "postgres://ann:hunter2@db/orders"),
        (PostgresStorage, "mysql://ann:hunter2@db/orders"),
        (MySQLStorage, "orders.db"),
    ],
)
def test_a_storage_refuses_the_url_of_another_database(storage: type, url: str) -> None:
    with pytest.raises(InvalidURLError, match="cannot use it") as caught:
        storage(url)

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgres://ann:hunter2@db/orders?sslmode=of course",
        "postgres://ann:hunter2@db/orders?sslmode=verify-full&sslrootcert=/no/such/file",
        "postgres://ann:hunter2@db/orders?prepared_statements=perhaps",
        "mysql://ann:hunter2@db/orders?sslmode=of course",
        "mysql://ann:hunter2@db/orders?ssl-mode=verify_ca&ssl_ca=/no/such/file",
        "ann:hunter2@tcp(db:3306)/orders?tls=custom",
        "sqlite:///orders.db?synchronous=perhaps",
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidURLError) as caught:
        open_storage(url)

    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "verifies", "checks_name"),
    [
        ("ann:pw@tcp(db)/orders?tls=true", True, True),
        ("ann:pw@tcp(db)/orders?tls=skip-verify", False, False),
        ("mysql://db/orders?sslmode=require", False, False),
        ("mysql://db/orders?ssl-mode=REQUIRED", False, False),
        ("mysql://db/orders?ssl-mode=VERIFY_CA", True, False),
        ("mysql://db/orders?ssl-mode=VERIFY_IDENTITY", True, True),
        ("mysql://db/orders?sslmode=verify-full", True, True),
    ],
)
def test_mysql_is_encrypted_as_the_url_asks(url: str, verifies: bool, checks_name: bool) -> None:
    context = ssl_context(parse_url(url))

    assert context is not None
    assert (bool(context.verify_mode), context.check_hostname) == (verifies, checks_name)


@pytest.mark.parametrize("option", ["", "?tls=false", "?sslmode=disable", "?ssl-mode=DISABLED"])
def test_mysql_is_not_encrypted_unless_asked(option: str) -> None:
    assert ssl_context(parse_url(f"mysql://db/orders{option}")) is None


@pytest.mark.parametrize(
    ("option", "mode"),
    [
        ("", "prefer"),
        ("?sslmode=disable", False),
        ("?sslmode=allow", "allow"),
        ("?sslmode=require", "require"),
        ("?sslmode=verify-full", "verify-full"),
    ],
)
def test_postgres_is_encrypted_as_the_url_asks(option: str, mode: str | bool) -> None:
    assert ssl_mode(parse_url(f"postgres://db/orders{option}")) == mode


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://localhost/db?target_session_attrs=read-write",
        "mysql://localhost/db?sslmod=require",
        "sqlite:///file.db?mode=ro",
    ],
)
def test_a_parameter_that_would_do_nothing_is_refused(url: str) -> None:
    with pytest.raises(InvalidURLError, match="means nothing here"):
        open_storage(url)


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [
        ("postgres://db/orders", "asyncpg", "postgres"),
        ("mariadb://ann@db/orders", "asyncmy", "mysql"),
    ],
)
def test_a_client_library_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, url: str, library: str, extra: str
) -> None:
    for runner in ("postgres", "mysql"):
        monkeypatch.delitem(sys.modules, f"romancy.storage.sql.runners.{runner}")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingDriverError, match=rf": run pip install 'romancy\[{extra}\]'$"):
        open_storage(url)
