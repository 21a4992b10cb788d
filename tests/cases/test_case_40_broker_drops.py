"""celery #8030 and #10205: after the broker's connections were dropped a few times, workers sit there and do nothing.

Kind: connections that break under processes which live on. All processes of a run go on by themselves, and nothing is
asked twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from infra.connect import Server
from infra.errors import StoreUnavailable
from infra.states import Status
from tests.runs.house import House, housed
from tests.runs.run_aids import new_run, words


@pytest.fixture
async def house(redis_url: str, tmp_path: Path) -> AsyncIterator[House]:
    async with housed(redis_url, tmp_path) as house:
        yield house


async def test_connections_cut_three_times_are_made_again(house: House) -> None:
    server = Server(house.url)
    async with house.dispatcher(), house.pipelines():
        run = new_run(house.blobs, words(60), words(60))
        await house.runs.create(run)
        for _ in range(3):
            await asyncio.sleep(0.5)
            await server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with suppress(StoreUnavailable):  # this process's own connections were cut as well
            await house.store.lanes()
        async with house.worker.working():
            view = await house.end_of(run)
            await house.rests()
    await server.close()
    assert view.status is Status.SUCCEEDED and view.counts.coverage == 1.0
    assert set(house.worker.items.values()) == {1}
