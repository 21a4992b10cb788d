"""The Celery application of the steps of runs, and how to send a step.

Steps are short and idempotent. A step that is lost is sent again by the clock of runs, and one that comes twice
changes nothing, so the broker need not be more than quick: no result backend, no retries by the broker, no ETA tasks
(time lives in sorted sets), no chords (fan-in lives in the run's own state).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec
from celery import Celery
from redis.connection import parse_url

from infra.addresses import ClusterAddress, SentinelAddress
from infra.contracts import Notice
from infra.errors import StoreUnsuitable

ADVANCE = "millstream.runs.advance"
SPLIT = "millstream.runs.split"
QUEUE = "runs"
KEY_PREFIX = "ms:celery:"
VISIBILITY_SECONDS = 300  # a step whose worker died without a word is handed out again after so long
SOCKET_SECONDS = 10.0


def broker_url(redis_url: str) -> str:
    """The store's URL as Celery writes it: unix sockets have another scheme there, sentinels are a list.

    Raises StoreUnsuitable for a Cluster: Celery's broker moves messages between keys of several slots.
    """
    if ClusterAddress.parse(redis_url) is not None:
        raise StoreUnsuitable(
            "celery_url: the steps of runs need a server that is no Cluster; set MILLSTREAM_CELERY_URL (--celery-url) "
            "to a single server or to sentinels. A small one will do: it holds short messages, no part of a run"
        )
    if (address := SentinelAddress.parse(redis_url)) is not None:
        login = f"{quote(address.username or '')}:{quote(address.password, safe='')}@" if address.password else ""
        hosts = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in address.sentinels)
        return ";".join(f"sentinel://{login}{host}/{address.database}" for host in hosts)
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return parts._replace(query="").geturl()
    database = parse_qs(parts.query).get("db", ["0"])[0]
    login = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
    return f"redis+socket://{login}{parts.path}?virtual_host={database}"


def make_app(url: str) -> Celery:
    """`url` names the broker. Making the application connects to nothing."""
    app = Celery("millstream", broker=broker_url(url), set_as_current=False)
    app.conf.update(
        task_default_queue=QUEUE,
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        worker_soft_shutdown_timeout=10.0,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_enable_remote_control=False,
        task_publish_retry=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "global_keyprefix": KEY_PREFIX,
            "visibility_timeout": VISIBILITY_SECONDS,
            "socket_timeout": SOCKET_SECONDS,
            "socket_connect_timeout": SOCKET_SECONDS,
            "socket_keepalive": True,
            **_sentinel_options(url),
        },
        broker_use_ssl=_tls_options(url) or None,
    )
    return app


def _tls_options(url: str) -> dict[str, Any]:
    """The options of TLS, typed as redis-py wants them; none without TLS."""
    address = SentinelAddress.parse(url)
    if not (address.has_tls if address else url.startswith("rediss:")):
        return {}
    query = urlencode(address.options) if address else urlsplit(url).query
    typed: dict[str, Any] = parse_url(f"redis://?{query}")  # type: ignore[no-untyped-call]
    return {"ssl_cert_reqs": "required", **{name: typed[name] for name in typed if name.startswith("ssl_")}}


def _sentinel_options(url: str) -> dict[str, object]:
    address = SentinelAddress.parse(url)
    if address is None:
        return {}
    login = {"username": address.sentinel_username, "password": address.sentinel_password}
    tls = {"ssl": True, **_tls_options(url)} if address.has_tls else {}
    return {"master_name": address.service, "sentinel_kwargs": {**login, **tls}}


class StepSender:
    """Puts steps on the broker. Calls block: an event loop sends from a thread."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def advance(self, run_id: str, notices: Sequence[Notice] = ()) -> None:
        """Advances a run; the step deletes `notices` when its work is done. Raises kombu's OperationalError."""
        self._app.send_task(ADVANCE, args=[run_id, [msgspec.to_builtins(notice) for notice in notices]])

    def split(self, run_id: str, number: int) -> None:
        """Reads and splits document `number` of a run. Raises kombu's OperationalError."""
        self._app.send_task(SPLIT, args=[run_id, number])

    def close(self) -> None:
        self._app.close()
