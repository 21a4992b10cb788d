"""Addresses of the store. Pure.

redis://[user:password@]host:port/0      rediss:// with TLS      unix:///path
redis+sentinel://[user:password@]host:port,host:port/service/0[?sentinel_password=...]      rediss+sentinel://
redis+cluster://[user:password@]host:port,host:port      rediss+cluster://

The query holds more options of a connection, as redis-py names them: `ssl_ca_certs=/ca.crt` and the like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

PORT = 6379
SENTINEL_PORT = 26379

Host = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SentinelAddress:
    """A primary that sentinels know by its service name. The login and the options are the data servers'."""

    sentinels: tuple[Host, ...]
    service: str
    database: int = 0
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    has_tls: bool = False  # both of data servers and of sentinels
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> SentinelAddress | None:
        """None for an address of another kind. Raises ValueError, without any password in it, for a malformed one."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis+sentinel", "rediss+sentinel"):
            return None
        username, password, hosts = _login_and_hosts(parts.netloc, SENTINEL_PORT, "a sentinel")
        service, _, database = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError("the service's name is missing: redis+sentinel://host:port,host:port/SERVICE/0")
        if database and not database.isdigit():
            raise ValueError("the database is not a number: redis+sentinel://host:port,host:port/service/0")
        options = dict(parse_qsl(parts.query))
        return cls(
            sentinels=hosts,
            service=unquote(service),
            database=int(database or 0),
            username=username,
            password=password,
            sentinel_username=options.pop("sentinel_username", None),
            sentinel_password=options.pop("sentinel_password", None),
            has_tls=parts.scheme == "rediss+sentinel",
            options=tuple(options.items()),
        )


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """A Cluster: some of its servers, which know the others. All have the same login and options."""

    hosts: tuple[Host, ...]
    username: str | None = None
    password: str | None = None
    has_tls: bool = False
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> ClusterAddress | None:
        """None for an address of another kind. Raises ValueError, without any password in it, for a malformed one."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis+cluster", "rediss+cluster"):
            return None
        if parts.path.strip("/") not in ("", "0"):
            raise ValueError("a Cluster has database 0 alone: redis+cluster://host:port,host:port")
        username, password, hosts = _login_and_hosts(parts.netloc, PORT, "a server of the Cluster")
        has_tls = parts.scheme == "rediss+cluster"
        return cls(hosts, username, password, has_tls, tuple(parse_qsl(parts.query)))

    def url_of(self, host: Host) -> str:
        """The address of one of its servers."""
        name = f"[{host[0]}]" if ":" in host[0] else host[0]
        login = _login(self.username, self.password)
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{'rediss' if self.has_tls else 'redis'}://{login}{name}:{host[1]}/0{query}"


def without_password(url: str) -> str:
    """For messages: the address, its login and its query left out."""
    return re.sub(r"//[^/]*@", "//…@", url).partition("?")[0]


def _login_and_hosts(netloc: str, port: int, what: str) -> tuple[str | None, str | None, tuple[Host, ...]]:
    login, _, hosts = netloc.rpartition("@")
    username, _, password = login.partition(":")
    return (
        unquote(username) or None,
        unquote(password) or None,
        tuple(_host_and_port(host, port, what) for host in hosts.split(",")),
    )


def _host_and_port(text: str, port: int, what: str) -> Host:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{what} without a host: write host:port,host:port")
    return parts.hostname, parts.port or port


def _login(username: str | None, password: str | None) -> str:
    if username is None and password is None:
        return ""
    return f"{quote(username or '', safe='')}:{quote(password or '', safe='')}@"
