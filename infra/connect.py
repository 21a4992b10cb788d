"""Connections to Redis or Valkey: made, probed, and their errors translated."""

from __future__ import annotations

from typing import Any

import redis

from infra.addresses import ClusterAddress, without_password
from infra.cluster import Cluster
from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.node import Argument, Command, Node, first_error

# What the server must know. EVALSHA_RO came with Redis 7.0, whose script flags we need; no version string is trusted.
_COMMANDS = ("XADD", "XREADGROUP", "XINFO", "ZRANGEBYSCORE", "EVALSHA", "EVALSHA_RO", "PEXPIRE")
# Answers that mean "not now": a replica, a failover, a full or failing disk, full memory, a script that blocks.
_NOT_NOW = ("MISCONF", "NOREPLICAS", "UNBLOCKED", "BUSY")
_NOT_NOW_KINDS = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)


class Translated:
    """Within it, redis errors become ours: not now (StoreUnavailable), or never like this (StoreUnsuitable).

    Entered at every call of the store: a generator's context would cost more than what it guards.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, (redis.exceptions.RedisError, OSError)) and (ours := translation(error)) is not None:
            raise ours from error


def translation(error: Exception) -> StoreUnavailable | StoreUnsuitable | None:
    """Our word for a redis error; None for one that says of a command that it is wrong."""
    if isinstance(error, (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)):
        return StoreUnsuitable(f"the server refuses our credentials: {error}")
    if isinstance(error, redis.exceptions.NoPermissionError):
        return StoreUnsuitable(f"the server's access list denies us what we need: {error}")
    if isinstance(error, (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)):
        return StoreUnavailable(f"the store cannot be reached: {error}")
    is_not_now = isinstance(error, redis.exceptions.ResponseError) and str(error).startswith(_NOT_NOW)
    if is_not_now or isinstance(error, _NOT_NOW_KINDS):
        return StoreUnavailable(f"the store refuses this for now: {error}")
    return None


class Server:
    """The store's server through a pool of connections of its own, or a Cluster's servers, each through one.

    It never repeats a command by itself: only callers know what may be repeated. In a Cluster, the key says where a
    command goes; one without a key (INFO, TIME) takes a key to be `near`, which a single server does not need.
    """

    def __init__(self, url: str, *, max_connections: int = 32, timeout_seconds: float = 5.0) -> None:
        try:
            address = ClusterAddress.parse(url)
            self._servers: Node | Cluster
            if address is None:
                self._servers = Node(url, max_connections=max_connections, timeout_seconds=timeout_seconds)
            else:
                self._servers = Cluster(address, max_connections=max_connections, timeout_seconds=timeout_seconds)
        except ValueError as error:
            raise StoreUnsuitable(f"{without_password(url)!r} is no address of a server: {error}") from error

    @property
    def is_cluster(self) -> bool:
        return isinstance(self._servers, Cluster)

    async def raw(self, *parts: Argument, near: Argument | None = None) -> Any:
        """One command's answer. Raises redis errors as they are."""
        return await self._servers.one(parts, near=near)

    async def command(self, *parts: Argument, near: Argument | None = None) -> Any:
        with Translated():
            return await self.raw(*parts, near=near)

    async def batch(self, *commands: Command, near: Argument | None = None) -> list[Any]:
        """The answers of several commands in one round trip. No transaction: what must change together is a script."""
        with Translated():
            answers = await self.raw_batch(*commands, near=near)
            if (error := first_error(answers)) is not None:
                raise error
            return answers

    async def raw_batch(self, *commands: Command, near: Argument | None = None) -> list[Any]:
        """As `batch`, but redis errors as they are, and the server's own among the answers instead of raised."""
        return await self._servers.several(commands, near=near)

    async def everywhere(self, *parts: Argument) -> list[Any]:
        """The answers of every server that takes writes."""
        with Translated():
            return await self._servers.everywhere(parts)

    async def close(self) -> None:
        await self._servers.close()


async def probe(server: Server) -> None:
    """Raises StoreUnsuitable where a server cannot keep our promises, with what to change."""
    await _demand_the_kind_named(server)
    for known in await server.everywhere("COMMAND INFO", *_COMMANDS):
        missing = [name for name, about in zip(_COMMANDS, known, strict=True) if about is None]
        if missing:
            raise StoreUnsuitable(
                f"the server does not know {', '.join(missing)}; use Redis 7.0 or newer, or Valkey 8 or newer"
            )
    for memory in await server.everywhere("INFO", "memory"):
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise StoreUnsuitable(
                f"the server would throw jobs away when memory is full: maxmemory-policy is {policy}. "
                "Set it to noeviction (CONFIG SET maxmemory-policy noeviction, and in the server's configuration)."
            )


async def _demand_the_kind_named(server: Server) -> None:
    """Raises StoreUnsuitable for a single server's address that is a Cluster's, and the other way round."""
    try:
        [about, *_] = await server.everywhere("INFO", "cluster")
    except redis.exceptions.ResponseError as error:
        if "cluster support disabled" not in str(error):
            raise
        raise StoreUnsuitable("the server is in no Cluster; write its address as redis://host:port/0") from error
    if about.get("cluster_enabled") and not server.is_cluster:
        raise StoreUnsuitable(
            "the server is one of a Cluster; write its address as redis+cluster://host:port,host:port, "
            "with some servers of the Cluster"
        )
