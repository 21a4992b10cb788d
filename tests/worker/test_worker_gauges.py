"""The small parts that decide by figures: pulse, watchdog, capacity."""

import asyncio
from dataclasses import replace

import pytest

from engine import LLM, EngineConfig
from engine.stats import EngineStats
from infra.contracts import Claim, Job, JobSpec, Kind, Tier
from infra.states import Status
from worker import watchdog
from worker.attempt import Attempt, Phase
from worker.capacity import free_tokens
from worker.progress import Progress
from worker.pulse import Pulse
from worker.watchdog import until_hung


def test_a_pulse_is_silent_only_while_it_should_beat() -> None:
    now = [100.0]
    pulse = Pulse(lambda: now[0])
    now[0] += 50
    assert pulse.silent_seconds == 0, "it rests from the start"
    pulse.beat()
    now[0] += 7
    assert pulse.silent_seconds == 7
    pulse.beat()
    assert pulse.silent_seconds == 0
    now[0] += 7
    pulse.rest()
    assert pulse.silent_seconds == 0


async def test_a_loop_that_does_not_turn_has_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.02)
    pulse = Pulse()
    watching = asyncio.ensure_future(until_hung(pulse, after_seconds=0.1))
    await asyncio.sleep(0.2)
    assert not watching.done(), "it rests"
    for _ in range(20):
        pulse.beat()
        await asyncio.sleep(0.01)
    assert not watching.done(), "it turns"
    async with asyncio.timeout(10):
        await watching


async def test_a_process_that_was_stopped_has_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_SECONDS", 0.02)
    now = [0.0]
    pulse = Pulse(lambda: now[0])
    watching = asyncio.ensure_future(until_hung(pulse, after_seconds=0.1))
    for _ in range(5):
        pulse.beat()
        now[0] += 3600.0  # asleep in the middle of a turn
        await asyncio.sleep(0.03)
    assert not watching.done()
    watching.cancel()


def attempt(cost_tokens: int, phase: Phase, *, is_accepted: bool = True, num_choices: int = 1) -> Attempt:
    job = Job(
        id="job-1-abcdefgh",
        spec=JobSpec(model="m", kind=Kind.GENERATE, prompt="p"),
        status=Status.RUNNING,
        lane=1,
        tier=Tier.STANDARD,
        priority=0,
        tenant="t",
        cost_tokens=cost_tokens,
        attempt=1,
        lost_count=0,
        num_events=2,
        created_ms=0,
    )
    made = Attempt(Claim(job=job))
    made.phase = phase
    made.is_accepted = is_accepted
    made.progress = Progress.of(num_choices)
    return made


@pytest.fixture
def stats() -> EngineStats:
    return replace(LLM("fake", EngineConfig(max_num_seqs=4)).stats(), free_tokens=1000)


def test_an_idle_worker_takes_any_job(stats: EngineStats) -> None:
    assert free_tokens(stats, []) is None
    assert free_tokens(stats, [attempt(5, Phase.ENDING), attempt(5, Phase.OVER)]) is None


def test_what_is_on_its_way_to_the_engine_counts_whole(stats: EngineStats) -> None:
    accepted = attempt(300, Phase.RUNNING)
    assert free_tokens(stats, [accepted]) == 1000, "the engine's own figure counts it"
    assert free_tokens(stats, [accepted, attempt(300, Phase.RUNNING, is_accepted=False)]) == 700
    assert free_tokens(stats, [attempt(900, Phase.STARTING, is_accepted=False), accepted]) == 100
    assert free_tokens(stats, [attempt(9000, Phase.STARTING, is_accepted=False)]) == 0


def test_no_seat_no_claim(stats: EngineStats) -> None:
    running = attempt(1, Phase.RUNNING, num_choices=3)
    assert free_tokens(stats, [running]) == 1000
    assert free_tokens(stats, [running, attempt(1, Phase.RUNNING)]) == 0
    assert free_tokens(stats, [running, attempt(1, Phase.LEAVING)]) == 0
    running.progress.choices[1].finish_reason = "stop"
    assert free_tokens(stats, [running, attempt(1, Phase.RUNNING)]) == 1000
