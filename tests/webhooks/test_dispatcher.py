"""The dispatcher against real endpoints and a real store: everything is told, signed, and once it is told, over."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import openai
import pytest

from infra import keys
from infra.connect import Server
from infra.contracts import JobSpec, Kind, NewJob, RunItem, Webhook
from infra.errors import StoreUnavailable
from infra.jobs import RedisJobs
from infra.runs import DocumentSource, NewRun, SummaryParams, new_run_id
from infra.runs.redis import CLOCK, RedisRuns
from infra.states import Status
from tests.webhooks.listener import Listener, status
from tests.webhooks.webhook_aids import (
    SECRET,
    dispatcher_process,
    dispatching,
    end_job,
    eventually,
    num_notices,
    outbox_is_empty,
    quick,
    verify,
)
from worker.runs.app import ADVANCE, KEY_PREFIX, QUEUE
from worker.webhooks import event
from worker.webhooks.ledger import Fate, Ledger


@pytest.fixture
async def jobs(redis_url: str) -> AsyncIterator[RedisJobs]:
    store = await RedisJobs.connect(redis_url)
    yield store
    await store.close()


async def test_500_twice_then_200_is_one_webhook_in_three_signed_tries(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener(status(500), status(500), status(200)) as listener, dispatching(redis_url) as ledger:
        job_id = await end_job(jobs, webhook=listener.url)
        tries = await listener.wait_for(3)
        await outbox_is_empty(jobs)
        (webhook_id,) = {one.headers["webhook-id"] for one in tries}
        assert len({one.body for one in tries}) == 1
        for one in tries:
            told = verify(one)
            assert (told["id"], told["object"], told["type"]) == (webhook_id, "event", "job.succeeded")
            assert told["data"] == {
                "id": job_id, "object": "job", "status": "succeeded", "sequence_number": 2, "url": f"/v1/jobs/{job_id}",
            }  # fmt: skip
        unwrapped = openai.OpenAI(api_key="none").webhooks.unwrap(tries[2].body, tries[2].headers, secret=SECRET)
        assert unwrapped.id == webhook_id
        entry = await ledger.entry(webhook_id)
        assert entry is not None and (entry.fate, entry.num_tries) == (Fate.DELIVERED, 3)
        await asyncio.sleep(1.2)  # past the time after which a taken notice returns
    assert len(listener.received) == 3


async def test_each_try_has_a_fresh_timestamp(jobs: RedisJobs, redis_url: str) -> None:
    settings = quick(webhook_schedule="0,1.1")
    async with Listener(status(503), status(200)) as listener, dispatching(redis_url, settings):
        await end_job(jobs, webhook=listener.url)
        first, second = await listener.wait_for(2)
        assert first.headers["webhook-timestamp"] < second.headers["webhook-timestamp"]
        assert abs(int(second.headers["webhook-timestamp"]) - time.time()) < 60


async def test_a_dispatcher_killed_while_it_delivers_is_followed_by_the_next(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener(60.0, status(200)) as listener:
        async with dispatcher_process(redis_url) as process:
            job_id = await end_job(jobs, webhook=listener.url)
            await listener.wait_for(1)  # the endpoint has the first try, and hangs
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with dispatcher_process(redis_url):
            killed, delivered = await listener.wait_for(2)
            await outbox_is_empty(jobs)
    assert killed.headers["webhook-id"] == delivered.headers["webhook-id"]
    assert verify(delivered)["data"]["id"] == job_id  # type: ignore[index]


async def test_what_ends_while_no_dispatcher_lives_is_told_by_the_next(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener() as listener:
        job_ids = {await end_job(jobs, webhook=listener.url) for _ in range(20)}
        async with dispatcher_process(redis_url) as process:
            received = await listener.wait_for(20)
            await outbox_is_empty(jobs)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    assert {verify(one)["data"]["id"] for one in received} == job_ids  # type: ignore[index]


async def test_after_a_dispatcher_that_died_behind_the_delivery_only_the_deletion_is_left(
    jobs: RedisJobs, redis_url: str
) -> None:
    async with Listener() as listener:
        await end_job(jobs, webhook=listener.url)
        (notice,) = await jobs.take_notices((await jobs.lanes())[0], limit=10, hide_seconds=0)
        ledger = Ledger.open(redis_url)
        message = event.of_notice(notice)
        assert await ledger.begin_try(message) == (1, Fate.OPEN)
        await ledger.note(message, Fate.DELIVERED, "the endpoint answered 200", now_ms=1)
        await ledger.close()
        async with dispatching(redis_url):
            await outbox_is_empty(jobs)
        assert listener.num_connections == 0


async def test_two_dispatchers_tell_each_once(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener() as listener, dispatching(redis_url), dispatching(redis_url):
        for _ in range(40):
            await end_job(jobs, webhook=listener.url)
        await listener.wait_for(40)
        await outbox_is_empty(jobs)
        assert len({one.headers["webhook-id"] for one in listener.received}) == len(listener.received) == 40


async def test_an_endpoint_that_hangs_holds_nobody_else(jobs: RedisJobs, redis_url: str) -> None:
    settings = quick(webhook_concurrency=4, webhook_timeout_seconds=60.0, notice_hide_seconds=120.0)
    async with Listener(120.0) as dead, Listener() as good, dispatching(redis_url, settings):
        for _ in range(30):
            await end_job(jobs, webhook=dead.url)
        await dead.wait_for(1)
        job_ids = {await end_job(jobs, webhook=good.url) for _ in range(10)}
        received = await good.wait_for(10)
        assert {json.loads(one.body)["data"]["id"] for one in received} == job_ids
        assert dead.num_connections == 1  # of four slots, an endpoint has a quarter


async def test_the_last_try_makes_a_dead_letter(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener(status(404)) as listener, dispatching(redis_url) as ledger:
        await end_job(jobs, webhook=listener.url)
        await outbox_is_empty(jobs)
        (webhook_id,) = {one.headers["webhook-id"] for one in listener.received}
        assert len(listener.received) == 3
        assert await ledger.dead_letters(limit=10) == [webhook_id]
        entry = await ledger.entry(webhook_id)
        assert entry is not None and (entry.fate, entry.num_tries, entry.url) == (Fate.DEAD, 3, listener.url)
        assert entry.body == listener.received[0].body and "404" in entry.reason


async def test_410_ends_at_once(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener(status(410)) as listener, dispatching(redis_url) as ledger:
        await end_job(jobs, webhook=listener.url)
        await outbox_is_empty(jobs)
        assert len(listener.received) == 1
        assert len(await ledger.dead_letters(limit=10)) == 1


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest/", "http://[::1", "ftp://x.example/", "http://10.0.0.1"]
)
async def test_targets_that_are_denied_end_as_dead_letters(jobs: RedisJobs, redis_url: str, url: str) -> None:
    async with Listener() as good, dispatching(redis_url) as ledger:
        await end_job(jobs, webhook=url)
        await end_job(jobs, webhook=good.url)
        await good.wait_for(1)
        await outbox_is_empty(jobs)
        (webhook_id,) = await ledger.dead_letters(limit=10)
        entry = await ledger.entry(webhook_id)
        assert entry is not None and entry.url == url and entry.reason.startswith("refused: ")


async def test_without_a_setting_all_dispatchers_sign_with_one_kept_secret(jobs: RedisJobs, redis_url: str) -> None:
    settings = quick(webhook_secret=None)
    async with Listener() as listener, dispatching(redis_url, settings) as one, dispatching(redis_url, settings) as two:
        secret = await one.secret()
        assert secret == await two.secret()
        await end_job(jobs, webhook=listener.url)
        verify((await listener.wait_for(1))[0], secret)


async def test_the_sweep_expires_what_waited_too_long_and_tells_it(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener() as listener, dispatching(redis_url):
        lane = await jobs.open_lane("m")
        spec = JobSpec(model="m", kind=Kind.GENERATE, prompt="hello", webhook=Webhook(url=listener.url))
        job_id = keys.new_job_id(lane)
        await jobs.submit(NewJob(id=job_id, spec=spec, cost_tokens=1, queue_ttl_ms=50))
        (received,) = await listener.wait_for(1)
    expired = verify(received)
    assert (expired["type"], expired["data"]["status"]) == ("job.expired", "expired")  # type: ignore[index]
    job = await jobs.get(job_id)
    assert job is not None and job.status is Status.EXPIRED


async def test_a_run_is_sent_one_step_for_its_notices_which_stay(jobs: RedisJobs, redis_url: str) -> None:
    for item in ("map-0", "map-1"):
        await end_job(jobs, run_item=RunItem(run_id="run-aaaaaaaa", item_id=item))
    server = Server(redis_url)
    async with dispatching(redis_url, quick(notice_hide_seconds=60.0)):
        await eventually(lambda: server.command("LLEN", KEY_PREFIX + QUEUE))
    (message,) = await server.command("LRANGE", KEY_PREFIX + QUEUE, 0, -1)
    await server.close()
    assert json.loads(message)["headers"]["task"] == ADVANCE
    (run_id, notices), *_ = json.loads(base64.b64decode(json.loads(message)["body"]))
    assert (run_id, len(notices)) == ("run-aaaaaaaa", 2)
    assert await num_notices(jobs) == 2


async def test_a_broker_that_is_down_holds_no_webhook_and_loses_no_step(jobs: RedisJobs, redis_url: str) -> None:
    await end_job(jobs, run_item=RunItem(run_id="run-aaaaaaaa", item_id="map-0"))
    async with Listener() as listener, dispatching(redis_url, quick(celery_url="redis://127.0.0.1:1/0")):
        for count in range(1, 4):
            await end_job(jobs, webhook=listener.url)
            await listener.wait_for(count)
        assert await num_notices(jobs) >= 1
    server = Server(redis_url)
    async with dispatching(redis_url):
        await eventually(lambda: server.command("LLEN", KEY_PREFIX + QUEUE))
    await server.close()


async def test_open_runs_come_up_again_every_sweep(redis_url: str) -> None:
    runs, server = RedisRuns.open(redis_url), Server(redis_url)
    documents = [DocumentSource(id="a", name="a", blob="b")]
    await runs.create(NewRun(id=new_run_id(), params=SummaryParams(model="m"), documents=documents))

    async def has_three_steps() -> bool:
        return int(await server.command("LLEN", KEY_PREFIX + QUEUE)) >= 3

    async with dispatching(redis_url):
        await eventually(has_three_steps)
    await runs.close()
    await server.close()


@pytest.mark.parametrize(("events", "told"), [([], True), (["run.completed"], False), (["run.failed"], True)])
async def test_a_runs_end_is_told_once_and_the_run_rests(redis_url: str, events: list[str], told: bool) -> None:
    runs, server = RedisRuns.open(redis_url), Server(redis_url)
    async with Listener(status(500), status(200)) as listener, dispatching(redis_url):
        run = NewRun(
            id=new_run_id(),
            params=SummaryParams(model="m"),
            documents=[DocumentSource(id="a", name="a", blob="b")],
            webhook=Webhook(url=listener.url, events=events),
        )
        await runs.create(run)
        await runs.finish(run.id, Status.FAILED)
        await runs.wake(run.id)

        async def rests() -> bool:
            return not await server.command("ZCARD", CLOCK)

        await eventually(rests)
        assert len(listener.received) == (2 if told else 0)
        if told:
            ended = verify(listener.received[1])
            assert ended["type"] == "run.failed"
            assert ended["data"] == {"id": run.id, "object": "run", "status": "failed", "sequence_number": 1,
                                     "url": f"/v1/runs/{run.id}"}  # fmt: skip
    await runs.close()
    await server.close()


async def test_only_the_events_asked_for_are_told(jobs: RedisJobs, redis_url: str) -> None:
    async with Listener() as listener, dispatching(redis_url):
        await end_job(jobs, webhook=listener.url, events=["job.failed"])
        failed = await end_job(jobs, webhook=listener.url, events=["job.failed"], status=Status.FAILED)
        await listener.wait_for(1)
        await outbox_is_empty(jobs)
        assert [verify(one)["data"]["id"] for one in listener.received] == [failed]  # type: ignore[index]


async def test_a_server_that_comes_back_finds_the_dispatcher_waiting(jobs: RedisJobs, redis_url: str) -> None:
    server = Server(redis_url)
    async with Listener() as listener, dispatching(redis_url):
        await end_job(jobs, webhook=listener.url)
        await listener.wait_for(1)
        await server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await server.command("SCRIPT", "FLUSH")
        with suppress(StoreUnavailable):  # our own store's connections are cut as well
            await jobs.lanes()
        await end_job(jobs, webhook=listener.url)
        await listener.wait_for(2)
    await server.close()


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"webhook_schedule": "soon"}, "webhook_schedule"), ({"webhook_secret": "hunter2"}, "whsec_"),
     ({"webhook_allow": "10.0.0.1/8"}, "10.0.0.1/8"), ({"webhook_concurrency": 0}, "webhook")],
)  # fmt: skip
async def test_settings_that_cannot_be_used_are_one_line(redis_url: str, fields: dict[str, object], says: str) -> None:
    code = (
        "import json, sys; from infra.settings import *; from worker.dispatcher import run; "
        f"sys.exit(run(StoreSettings(redis_url={redis_url!r}), DispatcherSettings(**json.loads(sys.argv[1]))))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, json.dumps(fields),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"dispatcher: ") and says.encode() in err and err.count(b"\n") == 1
