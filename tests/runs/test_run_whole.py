"""A run through real processes: the dispatcher relays, Celery runs the steps, a scripted worker answers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.connect import Server
from infra.contracts import Webhook
from infra.states import Status
from tests.runs.house import House, housed
from tests.runs.run_aids import failure, new_run, summary, words
from tests.webhooks.listener import Listener, status
from tests.webhooks.webhook_aids import SECRET, eventually, verify
from worker.runs.app import KEY_PREFIX, QUEUE, StepSender, broker_url, make_app


@pytest.fixture
async def house(redis_url: str, tmp_path: Path) -> AsyncIterator[House]:
    async with housed(redis_url, tmp_path) as house:
        yield house


async def test_a_run_from_its_creation_to_its_webhook(house: House) -> None:
    async with (
        Listener(status(500), status(200)) as listener,
        house.dispatcher(),
        house.pipelines() as pipelines,
        house.worker.working(),
    ):
        run = new_run(house.blobs, words(40), "", words(2), webhook=Webhook(url=listener.url))
        await house.runs.create(run)
        view = await house.end_of(run)
        assert [one.status for one in view.documents] == [Status.SUCCEEDED, Status.FAILED, Status.SUCCEEDED]
        assert view.counts.coverage == 1.0
        assert set(house.worker.items.values()) == {1}
        await house.rests()
        first, second = listener.received
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert verify(second, SECRET)["type"] == "run.completed"
        pipelines.send_signal(signal.SIGTERM)
        assert await pipelines.wait() == 0


async def test_killing_dispatcher_and_pipelines_loses_and_doubles_nothing(house: House) -> None:
    house.worker.answer = lambda claim: (
        failure(claim) if claim.job.spec.run_item and claim.job.spec.run_item.item_id == "1:map-3" else summary(claim)
    )
    async with Listener() as listener, house.worker.working():
        run = new_run(house.blobs, words(60), words(60), words(60), webhook=Webhook(url=listener.url))
        await house.runs.create(run)
        num_before = 0
        for _ in range(3):  # each time some of the work is done, both are killed
            async with house.dispatcher(), house.pipelines():

                async def has_grown(num_before: int = num_before) -> bool:
                    return len(house.worker.items) >= num_before + 5

                await eventually(has_grown, timeout=60)
            num_before = len(house.worker.items)
        header = await house.runs.header(run.id)
        assert header is not None and not header.is_finished
        async with house.dispatcher(), house.pipelines(), house.pipelines():
            view = await house.end_of(run)
            await house.rests()
    assert view.status is Status.SUCCEEDED
    assert set(house.worker.jobs.values()) == {1} and set(house.worker.items.values()) == {1}
    (failed,) = [one for document in view.documents for one in document.failures]
    assert (failed.document_id, failed.item, failed.error.code) == ("doc-1", "map-3", "engine_error")
    assert view.counts.coverage is not None and 0.9 < view.counts.coverage < 1
    assert len({one.headers["webhook-id"] for one in listener.received}) == len(listener.received) == 1


async def test_steps_lost_by_the_broker_are_sent_again(house: House) -> None:
    server = Server(house.url)
    async with house.dispatcher(), house.worker.working():
        run = new_run(house.blobs, words(10))
        await house.runs.create(run)
        for _ in range(3):  # the broker forgets everything

            async def has_steps() -> bool:
                return bool(await server.command("LLEN", KEY_PREFIX + QUEUE))

            await eventually(has_steps)
            await server.command("DEL", KEY_PREFIX + QUEUE)
        async with house.pipelines():
            assert (await house.end_of(run)).status is Status.SUCCEEDED
    await server.close()


async def test_steps_sent_many_times_ask_each_item_once(house: House) -> None:
    sender = StepSender(make_app(house.url))
    async with house.dispatcher(), house.pipelines(), house.worker.working():
        run = new_run(house.blobs, words(40), words(20))
        await house.runs.create(run)
        for number in (0, 1, 0, 1, 0):
            await asyncio.to_thread(sender.split, run.id, number)
            for _ in range(4):
                await asyncio.to_thread(sender.advance, run.id)
        view = await house.end_of(run)
        await house.rests()
    sender.close()
    assert view.status is Status.SUCCEEDED and view.counts.coverage == 1.0
    assert set(house.worker.items.values()) == {1}


async def test_a_step_for_nonsense_harms_nobody(house: House) -> None:
    sender = StepSender(make_app(house.url))
    async with house.dispatcher(), house.pipelines(), house.worker.working():
        await asyncio.to_thread(sender.advance, "no such run")
        await asyncio.to_thread(sender.split, "run-00000000", 7)
        sender._app.send_task("millstream.runs.advance", args=[1, 2, 3])
        sender._app.send_task("no.such.task", args=[])
        run = new_run(house.blobs, words(2))
        await house.runs.create(run)
        assert (await house.end_of(run)).status is Status.SUCCEEDED
    sender.close()


@pytest.mark.parametrize(
    ("url", "broker"),
    [("redis://h:1/2", "redis://h:1/2"), ("rediss://u:p@h/0", "rediss://u:p@h/0"),
     ("unix:///tmp/s.sock", "redis+socket:///tmp/s.sock?virtual_host=0"),
     ("unix://u:p@/tmp/s.sock?db=3", "redis+socket://u:p@/tmp/s.sock?virtual_host=3")],
)  # fmt: skip
def test_the_brokers_address(url: str, broker: str) -> None:
    assert broker_url(url) == broker


def test_the_application_keeps_the_rules_for_steps() -> None:
    conf = make_app("redis://h:1/2").conf
    assert conf.task_acks_late and conf.task_reject_on_worker_lost and conf.worker_prefetch_multiplier == 1
    assert conf.accept_content == ["json"] and conf.task_serializer == "json" and conf.result_backend is None
    assert conf.worker_soft_shutdown_timeout > 0
    assert conf.broker_transport_options["global_keyprefix"] == KEY_PREFIX
