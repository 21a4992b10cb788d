"""What makes connections by address: to one server, or to the primary that sentinels name at each new connection."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from redis.asyncio import ConnectionPool
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from infra.addresses import SentinelAddress


def pool_for(url: str, *, timeout_seconds: float) -> ConnectionPool:
    """redis-py's pool, of which only the making is used: `infra.node` keeps the connections.

    Connects to nothing. Raises ValueError for an address that is none. The time limit is for reaching the server.
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
    address = SentinelAddress.parse(url)
    if address is None:
        return ConnectionPool.from_url(url, **options)
    options = {"ssl": address.has_tls, **parse_url(f"redis://?{urlencode(address.options)}"), **options}
    login = {"username": address.sentinel_username, "password": address.sentinel_password}
    sentinels = Sentinel(  # type: ignore[no-untyped-call]
        list(address.sentinels), sentinel_kwargs={**options, "socket_timeout": timeout_seconds, **login}
    )
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        address.service,
        sentinels,
        db=address.database,
        username=address.username,
        password=address.password,
        **options,
    )
