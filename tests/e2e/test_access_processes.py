"""Every process under its own user, over TLS: a day's work of each, and the server has denied nothing."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from bench.chaos.endpoint import endpoint
from bench.chaos.site import ENGINE, Site
from infra.access import ACCESS, acl_line, user_of
from infra.embedded import EmbeddedServer
from infra.ports import free_port
from infra.settings import DispatcherSettings, GatewaySettings, PipelineSettings, WorkerSettings
from millstream.cli import main
from tests.infra.certificates import make_certificates
from tests.infra.test_access import set_user
from tests.infra.test_tls import binary_with_tls

PROCESSES = {
    GatewaySettings: "gateway",
    WorkerSettings: "worker",
    DispatcherSettings: "dispatcher",
    PipelineSettings: "pipelines",
}


OPERATOR = (
    "dead-letters", "lanes", "lanes add fake", "lanes pause 1", "lanes resume 1", "lanes open 1", "lanes close 2",
    "webhook-secret",
)  # fmt: skip


class OwnUsers(Site):
    """A site whose processes have logins of their own."""

    urls: dict[str, str]

    def _environment(self, *settings: object, store_url: str | None = None) -> dict[str, str]:
        return super()._environment(*settings, store_url=self.urls[PROCESSES[type(settings[0])]])  # type: ignore[index]


async def the_end(site: Site, path: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await site.http.get(path)).json()
            if found["finished_at"] is not None:
                return found
            await asyncio.sleep(0.1)


@pytest.mark.timeout(240)
async def test_each_process_does_its_work_with_its_own_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    certificates, port = make_certificates(tmp_path / "certificates"), free_port()
    server = EmbeddedServer(
        tmp_path / "server", binary=binary_with_tls(), directives=[f"tls-port {port}", *certificates.directives]
    )
    server.start()
    urls = {
        process: f"rediss://{user_of(process)}:{process}-secret@localhost:{port}/0{certificates.query}"
        for process in ACCESS
    }
    with redis.Redis.from_url(server.url) as client:
        for process in ACCESS:
            set_user(client, acl_line(process, f"{process}-secret"))
        client.execute_command("ACL LOG", "RESET")
        site: OwnUsers | None = None
        try:
            async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http, endpoint() as outside:
                site = OwnUsers(tmp_path, server, http, short=True)
                site.urls = urls
                await site.gateway(sweep_seconds=0.3, watch_seconds=2.0)
                slow = {**ENGINE, "fake_seconds_per_step": 0.02}
                worker = await site.worker(engine=slow)
                await site.dispatcher(webhook_allow="127.0.0.1", sweep_seconds=0.3)
                await site.pipelines(run_window=4)
                await _a_days_work(site, outside.url("ok/job"))
                worker.send(signal.SIGTERM)
                assert await worker.ended() == 0
                other = await site.worker()  # goes on with what was handed over
                await _the_rest(site)
                async with asyncio.timeout(30):
                    while len(outside.requests) < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                await other.kill()
                monkeypatch.setenv("MILLSTREAM_REDIS_URL", urls["operator"])
                for line in OPERATOR:
                    assert await asyncio.to_thread(main, line.split()) == 0, capsys.readouterr().err
                await asyncio.sleep(1.0)  # somebody drops lane 2
                denied = client.execute_command("ACL LOG", 100)
                assert denied == [], denied
                assert "access list denies" not in site.output
        finally:
            if site is not None:
                site.end()
            server.kill()
    assert urlsplit(server.url).port != port


async def _a_days_work(site: Site, webhook: str) -> None:
    http = site.http
    job = {"model": "fake", "input": "hello", "params": {"max_tokens": 8}}
    first = (await http.post("/v1/jobs", json={**job, "webhook": {"url": webhook}})).json()
    async with http.stream("GET", f"/v1/jobs/{first['id']}/events") as events:
        assert [line async for line in events.aiter_lines() if line.startswith("event: job.succeeded")]
    keyed = [await http.post("/v1/jobs", json=job, headers={"Idempotency-Key": "k"}) for _ in range(2)]
    assert len({one.json()["id"] for one in keyed}) == 1
    long = {**job, "params": {"max_tokens": 4000}}
    cancelled = (await http.post("/v1/jobs", json=long)).json()["id"]
    assert (await http.post(f"/v1/jobs/{cancelled}/cancel")).json()["status"] == "cancelled"
    assert (await http.delete(f"/v1/jobs/{cancelled}")).status_code in (200, 204)
    assert len((await http.get("/v1/jobs")).json()["data"]) >= 2
    bulk = await http.post("/v1/jobs/bulk", json={"jobs": [job, job]})
    assert bulk.status_code < 300
    expired = {**long, "queue_ttl": 0.001, "tier": "bulk"}
    assert (await http.post("/v1/jobs", json=expired)).status_code == 202
    for answer in (
        await http.post("/internal/lanes/1/pause"),
        await http.get(f"/v1/jobs/{(await http.post('/v1/jobs', json=job)).json()['id']}"),
        await http.get("/internal/scale/fake"),
        await http.get("/metrics"),
        await http.get("/readyz"),
        await http.post("/internal/lanes/1/resume"),
        await http.get(f"/v1/jobs/{first['id']}/timeline"),
        await http.post("/v1/completions", json={"model": "fake", "prompt": "hello", "max_tokens": 4}),
    ):
        assert answer.status_code == 200, (answer.request.url, answer.text)
    run = {"model": "fake", "chunk_tokens": 400, "target_tokens": 16, "fan_in": 3,
           "documents": [{"text": "words " * 300}, {"text": "others " * 200}], "webhook": {"url": webhook}}  # fmt: skip
    answer = await http.post("/v1/runs/summarize", json=run)
    assert answer.status_code == 202, answer.text
    ended = await the_end(site, f"/v1/runs/{answer.json()['id']}")
    assert ended["status"] == "succeeded"
    second = (await http.post("/v1/runs/summarize", json={**run, "documents": [{"text": "more " * 3000}]})).json()["id"]
    await asyncio.sleep(0.5)
    assert (await http.post(f"/v1/runs/{second}/cancel")).status_code < 300
    site.late = (await http.post("/v1/jobs", json={**job, "params": {"max_tokens": 400}})).json()["id"]  # type: ignore[attr-defined]
    await asyncio.sleep(0.3)


async def _the_rest(site: Site) -> None:
    late = await the_end(site, f"/v1/jobs/{site.late}")  # type: ignore[attr-defined]
    assert late["status"] == "succeeded"
