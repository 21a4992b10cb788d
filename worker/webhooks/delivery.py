"""One try to tell an endpoint something: one POST, to an address that was judged before it is dialled."""

from __future__ import annotations

import asyncio
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from urllib.parse import quote

import httpx

from worker.webhooks import ssrf
from worker.webhooks.schedule import Answer, Answered, Unanswered
from worker.webhooks.ssrf import Allowed, Resolver, Target, TargetDenied

MAX_BODY_BYTES = 64 * 1024  # of an answer, read at most; what it says does not matter
MAX_BODY_SECONDS = 1.0
MAX_ADDRESSES = 4  # of a name, tried in the order found


class Sender:
    """Sends bodies to URLs. Each try has a connection of its own: no cookies, no proxies, no redirects, no keep-alive.

    A reused connection could belong to another host name at the same address, so none is reused.
    """

    def __init__(self, *, allowed: Allowed, timeout_seconds: float, concurrency: int, resolve: Resolver | None = None,
                 tls: ssl.SSLContext | None = None) -> None:  # fmt: skip
        """`resolve` and `tls` stand in for the system's name service and certificate authorities."""
        self._threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="resolve")
        self._resolve = resolve or ssrf.system_resolver(self._threads)
        self._allowed = allowed
        self._timeout_seconds = timeout_seconds
        self._client = httpx.AsyncClient(
            verify=tls or ssl.create_default_context(),
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # the deadline is on the whole try, below
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def send(self, url: str, body: bytes, headers: dict[str, str]) -> Answer:
        """One try, never longer than the timeout, name service and answer included. Raises nothing of the network's."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                target = await ssrf.target_of(url, self._allowed, self._resolve)
                return await self._post(target, body, headers)
        except TargetDenied as error:
            return Unanswered(f"refused: {error}", for_good=error.for_good)
        except TimeoutError:
            return Unanswered(f"no answer within {self._timeout_seconds:g} s")
        except (httpx.HTTPError, OSError) as error:
            return Unanswered(f"no answer: {type(error).__name__}: {error}"[:500])

    async def _post(self, target: Target, body: bytes, headers: dict[str, str]) -> Answer:
        addresses = target.addresses[:MAX_ADDRESSES]
        for address in addresses[:-1]:
            try:
                return await self._post_to(address, target, body, headers)
            except httpx.ConnectError:
                continue  # nothing was sent; the name has another address
        return await self._post_to(addresses[-1], target, body, headers)

    async def _post_to(self, address: str, target: Target, body: bytes, headers: dict[str, str]) -> Answer:
        request = self._client.build_request(
            "POST",
            httpx.URL(scheme=target.scheme, host=address, port=target.port, raw_path=_raw(target.path)),
            content=body,
            headers={
                "host": target.authority,
                "content-type": "application/json",
                "user-agent": "Millstream-Webhooks/1",
                "accept-encoding": "identity",
                "connection": "close",
                **headers,
            },
            extensions={"sni_hostname": target.host},
        )
        response = await self._client.send(request, stream=True)
        try:
            await _read_a_little(response)
            return Answered(response.status_code, _retry_after(response.headers.get("retry-after"), time.time()))
        finally:
            await response.aclose()

    async def close(self) -> None:
        await self._client.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _read_a_little(response: httpx.Response) -> None:
    """Takes what there is of the answer's body, so that the endpoint sees it taken. Its status has decided already:

    a body that drips, breaks off or never ends changes nothing, so neither its time nor its errors count.
    """
    seen = 0
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(MAX_BODY_SECONDS):
            async for part in response.aiter_raw():
                seen += len(part)
                if seen >= MAX_BODY_BYTES:
                    return


def _raw(path: str) -> bytes:
    """The path as it goes on the wire. Never joined to a URL: `//host` in a path would name another host."""
    return quote(path, safe="%/:?#[]@!$&'()*+,;=-._~").encode()


def _retry_after(text: str | None, now_seconds: float) -> float | None:
    """Seconds that a Retry-After header asks for, in either of its forms; None where it says nothing usable."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now_seconds)
    except (ValueError, OverflowError):
        return None
