"""Database URLs: which database, where, and as whom; a password is never shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

from .errors import InvalidURLError

_GO_DSN = re.compile(
    r"(?P<credentials>.*)@(?P<net>tcp|unix)\((?P<address>[^)]*)\)/(?P<database>[^?]*)(\?(?P<options>.*))?"
)
_SERVERS = {"postgres": "postgres", "postgresql": "postgres", "mysql": "mysql", "mariadb": "mysql"}
_PORTS = {"postgres": 5432, "mysql": 3306}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class DatabaseURL(msgspec.Struct, frozen=True):
    """A database URL taken apart, credentials percent-decoded."""

    kind: str
    """sqlite, postgres or mysql."""
    host: str = ""
    port: int = 0
    user: str = ""
    password: str = ""
    database: str = ""
    """The file's path for SQLite."""
    socket: str = ""
    options: Mapping[str, str] = {}

    def option(self, name: str) -> str | None:
        """A parameter behind the question mark."""
        return self.options.get(name)

    def flag(self, name: str, *, default: bool) -> bool:
        """A parameter that is true or false."""
        text = self.options.get(name, str(default)).lower()
        if text not in _TRUE + _FALSE:
            raise InvalidURLError(f"{name} must be true or false, not {text!r}")
        return text in _TRUE

    @property
    def shown(self) -> str:
        """The URL for messages and logs: without the password."""
        if self.kind == "sqlite":
            return f"sqlite:///{self.database}"
        user = f"{quote(self.user)}@" if self.user else ""
        return f"{self.kind}://{user}{self.socket or self.host}:{self.port}/{self.database}"

    def __repr__(self) -> str:
        return f"DatabaseURL({self.shown!r})"


def parse_url(url: str) -> DatabaseURL:
    """Understand a URL, a bare path of an SQLite file, or Go's ``user:password@tcp(host:port)/db``."""
    if not url or "\0" in url:
        raise InvalidURLError("a database URL must not be empty or hold a NUL")
    scheme, separator, rest = url.partition("://")
    dsn = _GO_DSN.fullmatch(url if not separator else rest if scheme in ("mysql", "mariadb") else "")
    if dsn is not None:
        return _from_dsn(dsn)
    if not separator:
        return _sqlite(url.removeprefix("sqlite:"))
    if scheme == "sqlite":
        return _sqlite(rest.removeprefix("/") if rest.startswith("/") else rest)
    if scheme not in _SERVERS:
        raise InvalidURLError(f"unknown database scheme {scheme!r}; use sqlite, postgresql, mysql or mariadb")
    return _from_server_url(_SERVERS[scheme], url)


def _sqlite(text: str) -> DatabaseURL:
    path, _, query = text.partition("?")
    if not path:
        raise InvalidURLError("the SQLite URL names no file; use sqlite:///path, or sqlite://:memory:")
    return DatabaseURL(kind="sqlite", database=unquote(path), options=_options(query))


def _from_server_url(kind: str, url: str) -> DatabaseURL:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        # Python quotes the offending part, and that may be a password with an unescaped character.
        raise InvalidURLError(
            f"not a {kind} URL: the host or port cannot be read; percent-encode special characters in the password"
        ) from error if "@" not in str(error) else None
    options = _options(parts.query)
    host = unquote(parts.hostname or "") or options.get("host", "")
    socket = host if host.startswith("/") else options.get("unix_socket", "")
    return DatabaseURL(
        kind=kind,
        host=host or "localhost",
        port=port or int(options.get("port", _PORTS[kind])),
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=unquote(parts.path.removeprefix("/")),
        socket=socket,
        options=options,
    )


def _from_dsn(dsn: re.Match[str]) -> DatabaseURL:
    user, _, password = dsn["credentials"].partition(":")
    host, _, port = dsn["address"].rpartition(":") if ":" in dsn["address"] else (dsn["address"], "", "")
    if port and not port.isdigit():
        raise InvalidURLError("the port of the DSN is not a number")
    socket = dsn["address"] if dsn["net"] == "unix" else ""
    return DatabaseURL(
        kind="mysql",
        host=host or "localhost",
        port=int(port or _PORTS["mysql"]),
        user=user,
        password=password,
        database=dsn["database"],
        socket=socket,
        options=_options(dsn["options"] or ""),
    )


def _options(query: str) -> dict[str, str]:
    return dict(parse_qsl(query, keep_blank_values=True))
