"""Database URLs: which database, where, and as whom; a password is never shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

import msgspec

from .errors import InvalidURLError

_GO_DSN = re.compile(
    r"(?P<credentials>.*)@(?P<net>tcp|unix)\((?P<address>[^)]*)\)/(?P<database>[^?]*)(\?(?P<options>.*))?",
    re.DOTALL,
)
_SERVER = re.compile(r"(?P<server>[^/?#]*)(/(?P<database>[^?#]*))?(\?(?P<options>[^#]*))?")
_ADDRESS = re.compile(r"(\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:]*))(:(?P<port>[0-9]*))?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_CREDENTIALS = re.compile(r".*:.*@", re.DOTALL)
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

    def seconds(self, name: str, *, default: float) -> float:
        """A parameter that is a time in seconds."""
        text = self.options.get(name, str(default))
        try:
            return float(text)
        except ValueError as error:
            raise InvalidURLError(f"{name} must be a number of seconds, not {text!r}") from error

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
    """Understand a URL, a bare path of an SQLite file, or Go's ``user:password@tcp(host:port)/db``.

    InvalidURLError otherwise. Its message never quotes more than a scheme or the name of a parameter: what cannot be
    understood may be a password.
    """
    if not url or "\0" in url:
        raise InvalidURLError("a database URL must not be empty or hold a NUL")
    scheme, separator, rest = url.partition("://")
    if not separator or not _SCHEME.fullmatch(scheme):
        dsn = _GO_DSN.fullmatch(url)
        return _from_path(url) if dsn is None else _from_dsn(dsn)
    scheme = scheme.lower()
    if scheme == "sqlite":
        return _from_sqlite(rest.removeprefix("/"))
    if scheme not in _SERVERS:
        raise InvalidURLError(f"unknown database scheme {scheme!r}; use sqlite, postgresql, mysql or mariadb")
    kind = _SERVERS[scheme]
    dsn = _GO_DSN.fullmatch(rest) if kind == "mysql" else None
    return _from_server(kind, rest) if dsn is None else _from_dsn(dsn)


def _from_path(path: str) -> DatabaseURL:
    if path.startswith("sqlite:"):
        return _from_sqlite(path.removeprefix("sqlite:"))
    if _CREDENTIALS.match(path):
        raise InvalidURLError(
            "neither a URL nor a path: for MySQL write user:password@tcp(host:port)/database, for a file sqlite:///path"
        )
    return DatabaseURL(kind="sqlite", database=path)


def _from_sqlite(text: str) -> DatabaseURL:
    path, _, query = text.partition("?")
    if not path:
        raise InvalidURLError("the SQLite URL names no file; use sqlite:///path, or sqlite://:memory:")
    return DatabaseURL(kind="sqlite", database=unquote(path), options=_options(query))


def _from_server(kind: str, text: str) -> DatabaseURL:
    parts = _SERVER.fullmatch(text)
    credentials, _, server = parts["server"].rpartition("@") if parts else ("", "", "")
    address = _ADDRESS.fullmatch(server)
    # A character that was not escaped cuts a password in two: its end is then where no @ has a meaning.
    if parts is None or address is None or "@" in (parts["database"] or ""):
        raise _unreadable(kind)
    options = _options(parts["options"] or "")
    if any("@" in name for name in options):
        raise _unreadable(kind)
    user, _, password = credentials.partition(":")
    given_password = options.pop("password", "")
    host = unquote(address["ipv6"] or address["host"] or "") or options.get("host", "")
    return DatabaseURL(
        kind=kind,
        host=host or "localhost",
        port=_port(address["port"] or options.get("port", "")) or _PORTS[kind],
        user=unquote(user) or options.get("user", ""),
        password=unquote(password) or given_password,
        database=unquote(parts["database"] or "") or options.get("dbname", ""),
        socket=host if host.startswith("/") else options.get("unix_socket", ""),
        options=options,
    )


def _from_dsn(dsn: re.Match[str]) -> DatabaseURL:
    user, _, password = dsn["credentials"].partition(":")
    socket = dsn["address"] if dsn["net"] == "unix" else ""
    address = _ADDRESS.fullmatch("" if socket else dsn["address"])
    if address is None:
        raise _unreadable("mysql")
    return DatabaseURL(
        kind="mysql",
        host=address["ipv6"] or address["host"] or "localhost",
        port=_port(address["port"] or "") or _PORTS["mysql"],
        user=user,
        password=password,
        database=dsn["database"],
        socket=socket,
        options=_options(dsn["options"] or ""),
    )


def _unreadable(kind: str) -> InvalidURLError:
    return InvalidURLError(
        f"not a {kind} URL: its host, port or database cannot be read;"
        " percent-encode special characters in the password, @ as %40, / as %2F, # as %23"
    )


def _port(text: str) -> int | None:
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise InvalidURLError("the port of the database URL is not a number from 1 to 65535")
    return int(text)


_KNOWN = {
    "sqlite": ("synchronous",),
    "postgres": (
        *("sslmode", "sslrootcert", "sslcert", "sslkey"),
        *("application_name", "connect_timeout", "prepared_statements", "host", "port", "user", "dbname"),
    ),
    "mysql": (
        *("sslmode", "ssl-mode", "tls", "ssl_ca", "ssl_cert", "ssl_key"),
        *("unix_socket", "connect_timeout", "host", "port", "user", "dbname"),
        # Found in the DSNs of Go programs; what they ask for is the case anyway.
        *("charset", "collation", "parseTime", "loc", "multiStatements"),
    ),
}


def check_options(url: DatabaseURL) -> DatabaseURL:
    """InvalidURLError for a parameter that would do nothing."""
    for name in url.options:
        if name not in _KNOWN[url.kind]:
            known = ", ".join(sorted(_KNOWN[url.kind]))
            raise InvalidURLError(
                f"the {url.kind} URL has a parameter {name!r} that means nothing here; known: {known}"
            )
    return url


def _options(query: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return {unquote(name): unquote(value) for name, _, value in pairs}
