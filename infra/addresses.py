"""Addresses of the store. Pure.

redis://[user:password@]host:port/0      rediss:// with TLS      unix:///path
redis+sentinel://[user:password@]host:port,host:port/service/0[?sentinel_password=...]      rediss+sentinel://
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """A primary that sentinels know by its service name. The login is the data servers'."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    database: int = 0
    username: str | None = None
    password: str | None = None
    sentinel_password: str | None = None
    has_tls: bool = False
    options: tuple[tuple[str, str], ...] = ()  # the rest of the query: files of certificates

    @classmethod
    def parse(cls, url: str) -> SentinelAddress | None:
        """None for an address of another kind. Raises ValueError, without any password in it, for a malformed one."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis+sentinel", "rediss+sentinel"):
            return None
        login, _, hosts = parts.netloc.rpartition("@")
        username, _, password = login.partition(":")
        service, _, database = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError("the service's name is missing: redis+sentinel://host:port,host:port/SERVICE/0")
        if database and not database.isdigit():
            raise ValueError("the database is not a number: redis+sentinel://host:port,host:port/service/0")
        options = dict(parse_qsl(parts.query))
        sentinel_password = options.pop("sentinel_password", None)
        return cls(
            sentinels=tuple(_host_and_port(host) for host in hosts.split(",")),
            service=unquote(service),
            database=int(database or 0),
            username=unquote(username) or None,
            password=unquote(password) or None,
            sentinel_password=sentinel_password,
            has_tls=parts.scheme == "rediss+sentinel",
            options=tuple(options.items()),
        )


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a sentinel without a host: redis+sentinel://host:port,host:port/service/0")
    return parts.hostname, parts.port or SENTINEL_PORT
