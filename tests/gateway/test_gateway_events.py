"""A job's events over HTTP: complete, in order, resumable, whatever the client does."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.gateway.gateway_aids import ALIAS, Running
from tests.gateway.scripted import ScriptedWorker, text_of, until

NUM_TOKENS = 30
JOB = {"model": ALIAS, "input": "hello", "params": {"max_tokens": NUM_TOKENS}}


@dataclass
class Frame:
    id: int
    event: str
    data: dict[str, Any]


async def frames(client: httpx.AsyncClient, url: str, *, limit: int = 10_000, **request: Any) -> list[Frame]:
    """Frames of a stream until it ends, or until so many have come."""
    found: list[Frame] = []
    async with client.stream("GET", url, **request) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        async for line in answer.aiter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                fields[name] = value
            elif fields:
                found.append(Frame(int(fields["id"]), fields["event"], json.loads(fields["data"])))
                fields = {}
                if len(found) == limit:
                    break
    return found


def text(found: list[Frame]) -> str:
    return "".join(delta.get("text", "") for one in found for delta in one.data.get("deltas", []))


async def submit(running: Running, body: dict[str, Any] | None = None) -> str:
    answer = await running.client.post("/v1/jobs", json=body or JOB)
    return str(answer.json()["id"])


def assert_whole(found: list[Frame]) -> None:
    assert [one.id for one in found] == list(range(len(found)))
    assert [one.data["sequence_number"] for one in found] == [one.id for one in found]
    assert found[0].event == "job.queued" and found[-1].event == "job.succeeded"
    assert text(found) == text_of(NUM_TOKENS)


async def test_events_before_during_and_after_the_run(running: Running, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    job_id = await submit(running)
    before = asyncio.create_task(frames(running.client, f"/v1/jobs/{job_id}/events"))
    await asyncio.sleep(0.3)  # the stream is silent, and kept alive
    worker.gate.set()
    await until(lambda: worker.num_tokens_emitted >= 5)
    during = asyncio.create_task(frames(running.client, f"/v1/jobs/{job_id}/events"))
    assert_whole(await before)
    assert_whole(await during)
    after = await frames(running.client, f"/v1/jobs/{job_id}/events")
    assert_whole(after)
    assert after[-1].data["usage"]["completion_tokens"] == NUM_TOKENS


async def test_a_client_that_comes_back_gets_exactly_the_rest(
    running: Running, worker: ScriptedWorker, more_gateways: Callable[[], Any]
) -> None:
    """Cut off again and again, and reconnected to one gateway and the other."""
    others = [running, await more_gateways()]
    job_id = await submit(running)
    found: list[Frame] = []
    for turn in range(100):
        headers = {"Last-Event-ID": str(found[-1].id)} if found else {}
        client = others[turn % 2].client
        found += await frames(client, f"/v1/jobs/{job_id}/events", limit=1 + turn % 4, headers=headers)
        if found[-1].event == "job.succeeded":
            break
    assert_whole(found)


async def test_starting_after_and_the_end(running: Running, worker: ScriptedWorker) -> None:
    job_id = await submit(running)
    whole = await frames(running.client, f"/v1/jobs/{job_id}/events")
    rest = await frames(running.client, f"/v1/jobs/{job_id}/events", params={"starting_after": 10})
    assert rest == whole[11:]
    # The header of a reconnecting browser wins over the URL it repeats.
    both = await frames(
        running.client, f"/v1/jobs/{job_id}/events", params={"starting_after": 3}, headers={"Last-Event-ID": "20"}
    )
    assert both == whole[21:]
    done = await running.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(whole[-1].id)})
    assert done.status_code == 204
    bad = await running.client.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "x"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "Last-Event-ID"


async def test_many_clients_of_one_job_all_get_everything(running: Running, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    job_id = await submit(running)
    async with running.api(limits=httpx.Limits(max_connections=None)) as client:
        streams = [asyncio.create_task(frames(client, f"/v1/jobs/{job_id}/events")) for _ in range(20)]
        await until(lambda: running.gateway.hub.num_readers >= 20)
        worker.gate.set()
        for stream in streams:
            assert_whole(await stream)
    await until(lambda: not running.gateway.hub.num_readers)


async def test_many_jobs_at_once_are_never_mixed(running: Running, worker: ScriptedWorker) -> None:
    async with running.api(limits=httpx.Limits(max_connections=None)) as client:

        async def one() -> None:
            job_id = (await client.post("/v1/jobs", json=JOB)).json()["id"]
            assert_whole(await frames(client, f"/v1/jobs/{job_id}/events"))

        await asyncio.gather(*(one() for _ in range(24)))


async def test_a_silent_stream_has_keepalive_comments(running: Running) -> None:
    job_id = await submit(running)
    async with running.client.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        async for line in answer.aiter_lines():
            if line == ": keepalive":
                break


async def test_a_silent_answer_has_keepalive_comments_and_only_then(running: Running, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    chat = {"model": ALIAS, "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 2}
    async with running.client.stream("POST", "/v1/chat/completions", json=chat) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == ": keepalive"
        worker.gate.set()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]" and rest.count(": keepalive") <= 2


async def test_hanging_up_on_events_does_not_cancel_the_job(running: Running, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    job_id = await submit(running)
    stream = asyncio.create_task(frames(running.client, f"/v1/jobs/{job_id}/events"))
    await asyncio.sleep(0.1)
    stream.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stream
    worker.gate.set()
    job = (await running.client.get(f"/v1/jobs/{job_id}", params={"wait": 20})).json()
    assert job["status"] == "succeeded"


async def test_events_of_unknown_jobs(running: Running) -> None:
    for job_id in ("job-1-0123456789ab", "nonsense", "job-99-0123456789ab"):
        answer = await running.client.get(f"/v1/jobs/{job_id}/events")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "job_not_found"


async def test_shutdown_ends_streams_and_leaves_jobs(
    running: Running, worker: ScriptedWorker, more_gateways: Callable[[], Any]
) -> None:
    """Twenty open streams: all end, the gateway goes, the jobs go on, and another gateway has the rest."""
    worker.gate.clear()
    ids = [await submit(running) for _ in range(20)]
    other = await more_gateways()
    async with running.api(limits=httpx.Limits(max_connections=None)) as client:
        streams = [asyncio.create_task(frames(client, f"/v1/jobs/{job_id}/events")) for job_id in ids]
        await until(lambda: running.gateway.hub.num_readers == len(worker.claimed) == 20)
        running.server.should_exit = True
        firsts = [await stream for stream in streams]
    worker.gate.set()
    for job_id, first in zip(ids, firsts, strict=True):
        headers = {"Last-Event-ID": str(first[-1].id)}
        assert_whole(first + await frames(other.client, f"/v1/jobs/{job_id}/events", headers=headers))
