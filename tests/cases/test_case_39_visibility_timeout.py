"""celery #5935 and #5306, kombu #337: a task that outlasts the visibility timeout is run again, and counts twice.

Kind: steps that come twice, late, or after their work is done. Whatever the broker hands out again, each item of a run
is asked once, and a document gives one row.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from infra.connect import Server
from infra.contracts import Webhook
from infra.states import Status
from tests.runs.house import House, housed
from tests.runs.run_aids import new_run, words
from tests.webhooks.listener import Listener
from tests.webhooks.webhook_aids import eventually
from worker.runs.app import KEY_PREFIX

VISIBILITY_SECONDS = 1


@pytest.fixture
async def house(redis_url: str, tmp_path: Path) -> AsyncIterator[House]:
    async with housed(redis_url, tmp_path) as house:
        yield house


async def test_steps_handed_out_again_make_one_row_each(house: House) -> None:
    """One of two processes sleeps through the timeout with steps in hand, and wakes when the other has done them."""
    server = Server(house.url)

    async def num_in_hand() -> int:
        return int(await server.command("HLEN", f"{KEY_PREFIX}unacked") or 0)

    async def all_done() -> bool:
        return await num_in_hand() == 0

    async with (
        Listener() as listener,
        house.dispatcher(),
        house.pipelines(visibility_seconds=VISIBILITY_SECONDS) as sleeper,
    ):
        documents = [words(40, f"word{number}") for number in range(6)]
        run = new_run(house.blobs, *documents, webhook=Webhook(url=listener.url))
        await house.runs.create(run)
        async with asyncio.timeout(30):
            while not await num_in_hand():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        sleeper.send_signal(signal.SIGSTOP)
        held = await num_in_hand()
        assert held, "nothing was in hand: the fault did not happen"
        async with house.pipelines(visibility_seconds=VISIBILITY_SECONDS), house.worker.working():
            view = await house.end_of(run)
            sleeper.send_signal(signal.SIGCONT)
            await house.rests()
            await eventually(all_done, timeout=60)
    await server.close()
    assert view.status is Status.SUCCEEDED and view.counts.coverage == 1.0
    assert set(house.worker.items.values()) == {1} and set(house.worker.jobs.values()) == {1}
    assert view.header.output is not None
    rows = [json.loads(line) for line in house.blobs.get(view.header.output).decode().splitlines()]
    assert [row["id"] for row in rows] == [document.id for document in run.documents]
    assert len({one.headers["webhook-id"] for one in listener.received}) == len(listener.received) == 1
