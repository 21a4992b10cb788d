"""Who is calling. Each configured key is a tenant of its own; without keys only this machine is served."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from litestar.types import ASGIApp, Receive, Scope, Send

from api_gateway.errors import NotLocal, NotOperator, Unauthorized
from api_gateway.headers import header_of

TENANT_WITHOUT_KEYS = "default"

Middleware = Callable[[ASGIApp], ASGIApp]


class Caller(NamedTuple):
    """Where a request comes from, as far as it can be told."""

    address: str | None  # None: a socket without addresses
    host: str | None = None  # the Host header: the name by which this server was called
    origin: str | None = None  # the Origin header: the page that a browser sends the request for

    @property
    def is_local(self) -> bool:
        """Whether only this machine is involved: not a page from elsewhere, nor a name that was bent to point here."""
        return _is_local(self)


@dataclass(frozen=True, slots=True)
class Keyring:
    """The accepted keys, as SHA-256 digests: no key is kept, and comparing them takes the same time for any guess."""

    digests: tuple[bytes, ...]
    cache_secret: bytes

    @classmethod
    def from_settings(cls, api_keys: str, cache_secret: str) -> Keyring:
        """`api_keys` is comma-separated. The secret of the cache domains follows from the keys unless it is given."""
        names = sorted({key.strip() for key in api_keys.split(",") if key.strip()})
        secret = cache_secret or ",".join(names)
        return cls(
            digests=tuple(hashlib.sha256(key.encode()).digest() for key in names),
            cache_secret=hashlib.sha256(b"millstream cache domain:" + secret.encode()).digest(),
        )

    @property
    def is_empty(self) -> bool:
        return not self.digests

    def tenant_of(self, authorization: str | None, caller: Caller) -> str:
        """The caller's tenant. Raises Unauthorized, or NotLocal where no keys exist and the caller is elsewhere."""
        if self.is_empty:
            if not caller.is_local:
                raise NotLocal
            return TENANT_WITHOUT_KEYS
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized
        offered = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(offered, known) for known in self.digests]
        if not any(matches):
            raise Unauthorized("this API key is not known here; check it, or ask whoever runs this service for one")
        return f"key-{offered.hex()[:16]}"

    def cache_domain(self, tenant: str, narrowing: str = "") -> str:
        """Salt of the tenant's prefix cache. A caller's own salt narrows it and can never name another tenant's."""
        find = _domain if narrowing else _tenant_domain  # callers' own are too many, and may be large
        return find(self.cache_secret, f"{len(tenant)}:{tenant}{narrowing}")


def _domain(secret: bytes, name: str) -> str:
    return hmac.digest(secret, name.encode(), "sha256").hex()


_tenant_domain = lru_cache(maxsize=1024)(_domain)


@lru_cache(maxsize=1024)
def _is_local(caller: Caller) -> bool:
    names = [caller.address, caller.host and urlsplit(f"//{caller.host}").hostname]
    names += [urlsplit(caller.origin).hostname or caller.origin] if caller.origin else []
    return all(is_loopback(name) for name in names if name is not None)


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Operators:
    """Who may pause and resume lanes: whoever has an admin key; without any, only this machine."""

    digests: tuple[bytes, ...]

    @classmethod
    def from_settings(cls, admin_keys: str) -> Operators:
        """`admin_keys` is comma-separated."""
        names = sorted({key.strip() for key in admin_keys.split(",") if key.strip()})
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in names))

    def check(self, authorization: str | None, caller: Caller) -> None:
        """Raises Unauthorized without a key, NotOperator for a key, or a machine, that may not."""
        if not self.digests:
            if not caller.is_local:
                raise NotOperator
            return
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("this needs an admin key: `Authorization: Bearer <key>`")
        offered = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(offered, known) for known in self.digests]
        if not any(matches):
            raise NotOperator("this key is no admin key; lanes are paused and resumed by whoever runs this service")


def only_operators(operators: Operators) -> Middleware:
    """Middleware that lets operators pass."""

    def check(authorization: str | None, caller: Caller, state: dict[str, Any]) -> None:
        operators.check(authorization, caller)

    return _checking(check)


def only_callers(keyring: Keyring) -> Middleware:
    """Middleware that lets known callers pass and notes their tenant in the request's state."""

    def identify(authorization: str | None, caller: Caller, state: dict[str, Any]) -> None:
        state["tenant"] = keyring.tenant_of(authorization, caller)

    return _checking(identify)


def _checking(check: Callable[[str | None, Caller, dict[str, Any]], None]) -> Middleware:
    """Middleware rather than a guard, for which the framework would copy the whole route handler at each request."""

    def middleware(app: ASGIApp) -> ASGIApp:
        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            client = scope["client"]
            caller = Caller(client[0] if client else None, header_of(scope, b"host"), header_of(scope, b"origin"))
            check(header_of(scope, b"authorization"), caller, scope["state"])
            await app(scope, receive, send)

        return checked

    return middleware
