"""Addresses of the store, those of sentinels above all; the failover itself is proven in `bench.chaos`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from infra.addresses import SentinelAddress
from infra.connect import Server
from infra.errors import StoreUnavailable, StoreUnsuitable
from infra.settings import DispatcherSettings, PipelineSettings, StoreSettings
from worker import dispatcher
from worker.runs import pipelines
from worker.runs.app import broker_url, make_app

WHOLE = "rediss+sentinel://me:p%40ss@one:1,two,[::1]:3/mill/2?sentinel_password=other&ssl_ca_certs=/ca.crt"


def test_all_parts_of_a_sentinel_address() -> None:
    assert SentinelAddress.parse(WHOLE) == SentinelAddress(
        sentinels=(("one", 1), ("two", 26379), ("::1", 3)),
        service="mill",
        database=2,
        username="me",
        password="p@ss",
        sentinel_password="other",
        has_tls=True,
        options=(("ssl_ca_certs", "/ca.crt"),),
    )


@pytest.mark.parametrize("url", ["redis://host:1/0", "rediss://host/0", "unix:///socket"])
def test_other_addresses_are_no_sentinels(url: str) -> None:
    assert SentinelAddress.parse(url) is None


@pytest.mark.parametrize(
    "url",
    ["redis+sentinel://host:1", "redis+sentinel://host:1/", "redis+sentinel:///mill", "redis+sentinel://h:1/mill/x"],
)
def test_a_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(StoreUnsuitable, match="no address of a server"):
        Server(url)


async def test_sentinels_out_of_reach_are_a_store_out_of_reach() -> None:
    server = Server("redis+sentinel://:secret@127.0.0.1:9/mill/0", timeout_seconds=1.0)
    with pytest.raises(StoreUnavailable):
        await server.command("PING")
    await server.close()


def test_celery_gets_the_same_sentinels() -> None:
    assert broker_url(WHOLE) == (
        "sentinel://me:p%40ss@one:1/2;sentinel://me:p%40ss@two:26379/2;sentinel://me:p%40ss@[::1]:3/2"
    )
    options = make_app(WHOLE).conf.broker_transport_options
    tls = {"ssl_cert_reqs": "required", "ssl_ca_certs": "/ca.crt"}
    login = {"username": None, "password": "other"}
    assert (options["master_name"], options["sentinel_kwargs"]) == ("mill", {**login, "ssl": True, **tls})
    assert make_app(WHOLE).conf.broker_use_ssl == tls
    plain = make_app("redis+sentinel://one:1/mill?sentinel_password=other").conf
    assert plain.broker_transport_options["sentinel_kwargs"] == login
    assert plain.broker_use_ssl is None


@pytest.mark.parametrize("url", ["redis+cluster://h:1,h:2", "rediss+cluster://:p@h:1"])
def test_celery_refuses_a_cluster_with_the_remedy(url: str) -> None:
    with pytest.raises(StoreUnsuitable, match="MILLSTREAM_CELERY_URL"):
        make_app(url)


async def test_dispatcher_and_pipelines_say_that_a_cluster_needs_a_broker(
    cluster_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = StoreSettings(redis_url=cluster_url, cache_dir=tmp_path)
    with pytest.raises(StoreUnsuitable, match="MILLSTREAM_CELERY_URL"):
        async with dispatcher.opened(settings, DispatcherSettings()):
            pass
    assert await asyncio.to_thread(pipelines.run, settings, PipelineSettings()) == 1
    assert "MILLSTREAM_CELERY_URL" in capsys.readouterr().err
