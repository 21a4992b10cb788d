"""A dispatcher in this process or in one of its own, and jobs that end."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict

from standardwebhooks import Webhook

from infra import contracts, keys
from infra.contracts import JobSpec, Kind, NewJob, Outcome, RunItem
from infra.jobs import RedisJobs
from infra.settings import DispatcherSettings, StoreSettings
from infra.states import Status
from infra.store import JobStore
from tests.webhooks.listener import Received
from worker.dispatcher import opened
from worker.webhooks.ledger import Ledger

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYqr"


def quick(**changes: object) -> DispatcherSettings:
    """Settings with short waits; loopback may be told."""
    defaults: dict[str, object] = {
        "webhook_allow": "127.0.0.0/8",
        "webhook_secret": SECRET,
        "webhook_schedule": "0,0.2,0.2",
        "sweep_seconds": 0.2,
        "notice_hide_seconds": 1.0,
    }
    return DispatcherSettings(**{**defaults, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def dispatching(url: str, settings: DispatcherSettings | None = None) -> AsyncIterator[Ledger]:
    """A dispatcher in this process, for as long as the context lasts."""
    async with opened(StoreSettings(redis_url=url), settings or quick()) as dispatcher:
        stop = asyncio.Event()
        task = asyncio.create_task(dispatcher.run(stop))
        ledger = Ledger.open(url)
        try:
            yield ledger
        finally:
            stop.set()
            await task
            await ledger.close()


@asynccontextmanager
async def dispatcher_process(url: str, settings: DispatcherSettings | None = None) -> AsyncIterator[Process]:
    """A dispatcher in a process of its own, ready; killed at the end if it still lives."""
    code = (
        "import json, sys; from infra.settings import *; from worker.dispatcher import run; "
        "url, fields = sys.argv[1:]; "
        "sys.exit(run(StoreSettings(redis_url=url), DispatcherSettings(**json.loads(fields))))"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, url, json.dumps(asdict(settings or quick())), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"dispatcher ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def end_job(store: JobStore, *, webhook: str | None = None, events: list[str] | None = None,
                  run_item: RunItem | None = None, status: Status = Status.SUCCEEDED) -> str:  # fmt: skip
    """A job that has been submitted, claimed and committed; returns its id."""
    lane = await store.open_lane("m")
    spec = JobSpec(model="m", kind=Kind.GENERATE, prompt="hello", run_item=run_item)
    if webhook is not None:
        spec.webhook = contracts.Webhook(url=webhook, events=events or [])
    job_id = keys.new_job_id(lane, secrets.token_hex(12))
    await store.submit(NewJob(id=job_id, spec=spec, cost_tokens=1))
    claim = await store.claim(lane, "test", free_tokens=None, lease_seconds=30)
    assert claim is not None and claim.job.id == job_id
    assert await store.commit(claim.hold, Outcome(status=status))
    return job_id


def verify(received: Received, secret: str = SECRET) -> dict[str, object]:
    """The event that was sent, its signature checked by the library that receivers use."""
    event: dict[str, object] = Webhook(secret).verify(received.body, received.headers)
    return event


async def eventually(holds: Callable[[], Awaitable[object]], *, timeout: float = 30.0) -> None:
    """Waits until a question to a server has a true answer."""
    async with asyncio.timeout(timeout):
        while not await holds():  # noqa: ASYNC110 - the server sends no event
            await asyncio.sleep(0.02)


async def num_notices(store: RedisJobs) -> int:
    """Notices in the outboxes of all lanes, hidden ones included."""
    return sum([int(await store._server.command("ZCARD", keys.Lane(lane).outbox)) for lane in await store.lanes()])


async def outbox_is_empty(store: RedisJobs) -> None:
    async def is_empty() -> bool:
        return await num_notices(store) == 0

    await eventually(is_empty)
