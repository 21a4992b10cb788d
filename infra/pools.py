"""Pools of connections by address: one server, or the primary that sentinels name at each new connection."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from redis.asyncio import BlockingConnectionPool, ConnectionPool
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from infra.addresses import SentinelAddress


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Both: connections to the primary of now, and waiting for a free one instead of an error."""


def pool_for(url: str, *, max_connections: int, timeout_seconds: float) -> ConnectionPool:
    """Connects to nothing. Raises ValueError for an address that is none.

    The time limit is for connecting, and for waiting for a free connection. What is asked then has none of its own:
    whoever asks limits the whole of it (`infra.node`), which is cheaper than one limit for each read and write.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "driver_info": None,  # says nothing of itself (CLIENT SETINFO), which a user's access list would have to allow
        "socket_timeout": None,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    waiting = {"max_connections": max_connections, "timeout": timeout_seconds}
    address = SentinelAddress.parse(url)
    if address is None:
        return BlockingConnectionPool.from_url(url, **options, **waiting)
    options = {"ssl": address.has_tls, **parse_url(f"redis://?{urlencode(address.options)}"), **options}
    login = {"username": address.sentinel_username, "password": address.sentinel_password}
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        list(address.sentinels), sentinel_kwargs={**options, "socket_timeout": timeout_seconds, **login}
    )
    return _SentinelPool(  # type: ignore[no-untyped-call]
        address.service,
        sentinels,
        db=address.database,
        username=address.username,
        password=address.password,
        **options,
        **waiting,
    )
