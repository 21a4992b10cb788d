"""Where webhooks may go: public addresses, and what the operator allowed by name.

Python's `is_global` lets multicast, NAT64, 6to4 and other forms pass, so the table is our own. Sources: the IANA
registries of special-purpose addresses for IPv4 and IPv6 (RFC 6890 and what came after).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address
Resolver = Callable[[str, int], Awaitable[list[str]]]  # host, port -> addresses; raises OSError

_DENIED_V4 = [
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local, cloud metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments, 192.0.0.8 among them
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
]

# Only global unicast is let through at all. That leaves out ::/96 (IPv4-compatible), fc00::/7, fe80::/10, fec0::/10,
# ff00::/8, 64:ff9b:1::/48 and 5f00::/16.
_UNICAST_V6 = IPv6Network("2000::/3")
_DENIED_V6 = [
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, ORCHID, benchmarks
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
]
_NAT64 = IPv6Network("64:ff9b::/96")  # an IPv4 address behind a translator: judged as that address


class TargetDenied(Exception):
    """Webhooks may not go to this target; `for_good` where that cannot change."""

    def __init__(self, message: str, *, for_good: bool) -> None:
        super().__init__(message)
        self.for_good = for_good


def is_public(address: Address) -> bool:
    """Whether an address is one that anybody on the internet may be reached at."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _DENIED_V4)
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _UNICAST_V6 and not any(address in network for network in _DENIED_V6)


@dataclass(frozen=True, slots=True)
class Allowed:
    """Private targets that the operator wants reached: hosts by name, networks by address."""

    hosts: frozenset[str]
    networks: tuple[IPv4Network | IPv6Network, ...]

    @classmethod
    def parse(cls, text: str) -> Allowed:
        """From "hooks.internal,10.1.0.0/16,127.0.0.1". Raises ValueError for a network with host bits set."""
        hosts: set[str] = set()
        networks: list[IPv4Network | IPv6Network] = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            if "/" in part or ":" in part or part.replace(".", "").isdigit():
                networks.append(ipaddress.ip_network(part.strip("[]")))
            else:
                hosts.add(_plain(part))
        return cls(frozenset(hosts), tuple(networks))

    def names(self, host: str) -> bool:
        return _plain(host) in self.hosts

    def holds(self, address: Address) -> bool:
        inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return any((inner or address) in network for network in self.networks)


@dataclass(frozen=True, slots=True)
class Target:
    """A URL taken apart, with the addresses it may be dialled at. Nothing looks its name up again."""

    scheme: str
    host: str  # as in the URL: for the Host header, SNI and the certificate
    port: int
    path: str  # with the query
    addresses: tuple[str, ...]

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


_PORTS = {"http": 80, "https": 443}


async def target_of(url: str, allowed: Allowed, resolve: Resolver) -> Target:
    """Takes a URL apart and looks its host up, once. Raises TargetDenied; OSError where the name is not found.

    Every address that the name has must be good: one bad one among them, and none is dialled.
    """
    scheme, host, port, path = _parts(url)
    found = [ipaddress.ip_address(text.partition("%")[0]) for text in await resolve(host, port)]
    if not found:
        raise OSError(f"{host} has no address")
    if not allowed.names(host):
        refuse_private(host, (address for address in found if not allowed.holds(address)))
    return Target(scheme, host, port, path, tuple(dict.fromkeys(str(address) for address in found)))


def refuse_private(host: str, addresses: Iterable[Address]) -> None:
    for address in addresses:
        if not is_public(address):
            is_literal = _literal(host) is not None
            raise TargetDenied(
                f"{host} is not public" if is_literal else f"{host} has an address that is not public",
                for_good=is_literal,
            )


def _parts(url: str) -> tuple[str, str, int, str]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise TargetDenied(f"the URL cannot be read: {error}", for_good=True) from error
    if parts.scheme not in _PORTS or not host:
        raise TargetDenied("a webhook URL starts with https:// or http:// and names a host", for_good=True)
    if parts.username is not None or parts.password is not None:
        raise TargetDenied("a webhook URL carries no user and no password", for_good=True)
    if any(ord(char) < 33 or ord(char) == 127 for char in url):
        raise TargetDenied("a webhook URL holds no spaces and no control characters", for_good=True)
    try:
        host = host if _literal(host) else host.encode("idna").decode()
    except UnicodeError as error:
        raise TargetDenied("the URL's host is no host name", for_good=True) from error
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return parts.scheme, host, port or _PORTS[parts.scheme], path


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _plain(host: str) -> str:
    return host.lower().rstrip(".")


def system_resolver(executor: Executor) -> Resolver:
    """Looks names up as the system does, in threads of its own: a dead name server holds nobody else."""

    async def resolve(host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(executor, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        return [str(address[4][0]) for address in found]

    return resolve
