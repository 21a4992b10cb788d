"""Many mixed jobs, two workers, a small pool, a store that answers badly, cancels, a drain: all at once."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from infra.states import Status
from tests.worker.worker_aids import (
    ENGINE,
    SETTINGS,
    Backend,
    Faults,
    checked_log,
    said,
    serving,
    submit,
    the_end,
    told_by,
    undisturbed,
    until,
)

SHAKY_VERBS = ("publish", "commit", "renew", "release", "wait_for_work", "lanes")


class RandomFaults(Faults):
    """Each call of a shaky verb fails with one chance in eight, half of them after their effect."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def strikes(self, faults: Any, name: str) -> bool:
        return name in SHAKY_VERBS and self._chance.random() < 1 / 16


def random_ask(chance: random.Random) -> dict[str, Any]:
    return {
        "max_tokens": chance.choice([1, 5, 20, 60, 120]),
        "n": chance.choice([1, 1, 1, 2, 3]),
        "temperature": chance.choice([0.0, 1.0]),
        "seed": chance.randrange(100),
        "stop": chance.choice([[], [], ["th"], ["."]]),
    }


@pytest.mark.parametrize("seed", range(3))
async def test_every_job_ends_once_and_exactly(backend: Backend, seed: int) -> None:
    chance, faults = random.Random(seed), RandomFaults(seed)
    shaky = backend.with_faults(faults)
    engine = replace(ENGINE, num_kv_blocks=24, max_num_seqs=8, fake_seconds_per_step=0.001, swap_space=0.01)
    hasty = replace(SETTINGS, drain_seconds=0.05, lease_seconds=3.0)
    asks = [(f"{number} " + "x" * chance.randrange(60), random_ask(chance)) for number in range(60)]
    async with serving(shaky, engine=engine) as steady:
        ids: list[str] = []
        async with serving(shaky, engine=engine, settings=hasty) as leaving:
            for prompt, ask in asks:
                cost = len(prompt) + ask["max_tokens"] * ask["n"]
                ids.append(await submit(backend.store, prompt, cost_tokens=cost, **ask))
                await asyncio.sleep(0.005)
                if chance.random() < 0.1:
                    await backend.store.cancel(chance.choice(ids))
            assert await leaving.stop() is True
        assert leaving.worker.stats.num_held_blocks == 0
        for job_id, (prompt, ask) in zip(ids, asks, strict=True):
            job = await the_end(backend.store, job_id)
            told = told_by(await checked_log(backend.store, job_id))
            expected = undisturbed(prompt, **ask)
            assert job.lost_count == 0
            assert job.outcome is not None
            if job.status is Status.CANCELLED:
                for index, choice in told.items():
                    assert expected[index][0][: len(choice.token_ids)] == choice.token_ids
                    assert expected[index][1].startswith(choice.text)
            else:
                assert job.status is Status.SUCCEEDED
                assert job.outcome.result is not None
                assert said(job.outcome.result.choices) == expected
                assert list(told.values()) == job.outcome.result.choices
        await until(lambda: not steady.bridge.attempts and steady.worker.stats.num_requests == 0)
        assert steady.worker.stats.num_held_blocks == 0
    (lane,) = await backend.store.lanes("fake")
    load = await backend.store.load(lane)
    assert (sum(load.waiting.values()), load.running) == (0, 0)
