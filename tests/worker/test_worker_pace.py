"""The pace that is told is the pace that is."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.contracts import Pace
from worker.pace import NUM_COLUMNS, PaceMeter, fit


@dataclass(frozen=True)
class Counters:
    """Of an engine's stats, what the meter reads."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0


@dataclass
class Engine:
    """Takes exactly so long."""

    step: float
    output: float
    prompt: float
    meter: PaceMeter
    counters: Counters = Counters()

    def run(self, num_steps: int, *, outputs: int, prompts: int = 0, noise: random.Random | None = None) -> None:
        for _ in range(num_steps):
            seconds = self.step + self.output * outputs + self.prompt * prompts
            now = self.counters
            self.counters = replace(
                now,
                num_steps=now.num_steps + 1,
                num_generated_tokens=now.num_generated_tokens + outputs,
                num_computed_tokens=now.num_computed_tokens + outputs + prompts,
            )
            late = noise.uniform(-0.3, 0.3) if noise else 0.0
            self.meter.note(cast(Any, self.counters), seconds * (1 + late))

    def told(self) -> Pace:
        pace = self.meter.pace(num_seats=64, kv_tokens=1000)
        assert pace is not None
        return pace

    def error(self, *, outputs: int, prompts: int = 0) -> float:
        """Relative, of a step's time as the pace tells it."""
        pace = self.told()
        told = pace.seconds_per_step + pace.seconds_per_output_token * outputs + pace.seconds_per_prompt_token * prompts
        return told / (self.step + self.output * outputs + self.prompt * prompts) - 1


def test_nothing_measured_nothing_told() -> None:
    assert PaceMeter().pace(num_seats=8, kv_tokens=100) is None
    engine = Engine(0.001, 0, 0, PaceMeter())
    engine.run(3, outputs=1)  # less than a window
    assert engine.meter.pace(num_seats=8, kv_tokens=100) is None


def test_mixed_work_tells_the_three_apart() -> None:
    engine = Engine(0.02, 0.001, 0.0002, PaceMeter())
    chance = random.Random(1)
    for _ in range(60):
        batch = chance.choice([1, 2, 8, 32])
        engine.run(10, outputs=batch)
        engine.run(2, outputs=batch, prompts=chance.choice([100, 500]))
    pace = engine.told()
    assert pace.seconds_per_step == pytest.approx(0.02, rel=0.05)
    assert pace.seconds_per_output_token == pytest.approx(0.001, rel=0.05)
    assert pace.seconds_per_prompt_token == pytest.approx(0.0002, rel=0.1)
    assert (pace.num_seats, pace.kv_tokens) == (64, 1000)


def test_hiccups_average_out() -> None:
    engine, noise = Engine(0.01, 0.0005, 0.0001, PaceMeter()), random.Random(2)
    for batch in (1, 4, 16, 64) * 6:
        engine.run(100, outputs=batch, noise=noise)
        engine.run(8, outputs=batch, prompts=400, noise=noise)
    for batch in (1, 4, 16, 64):
        assert abs(engine.error(outputs=batch)) < 0.1


def test_a_batch_size_that_was_left_is_not_forgotten() -> None:
    engine = Engine(0.02, 0.001, 0.0, PaceMeter())
    engine.run(100, outputs=1)
    engine.run(20_000, outputs=32)  # for hours
    assert abs(engine.error(outputs=1)) < 0.1 and abs(engine.error(outputs=32)) < 0.02


def test_a_changed_pace_is_followed() -> None:
    engine = Engine(0.02, 0.001, 0.0, PaceMeter())
    engine.run(1000, outputs=8)
    engine.step, engine.output = 0.04, 0.002
    engine.run(1000, outputs=8)
    assert abs(engine.error(outputs=8)) < 0.02


def test_one_batch_size_is_told_right_though_not_apart() -> None:
    engine = Engine(0.02, 0.001, 0.0, PaceMeter())
    engine.run(1000, outputs=16)
    assert abs(engine.error(outputs=16)) < 0.01


@settings(max_examples=60, deadline=None)
@given(
    step=st.floats(1e-4, 0.1),
    output=st.floats(0, 0.01),
    prompt=st.floats(0, 0.01),
    work=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 64), st.integers(0, 500)), min_size=1, max_size=20),
)
def test_no_pace_is_negative_and_seen_work_is_told_right(
    step: float, output: float, prompt: float, work: list[tuple[int, int, int]]
) -> None:
    engine = Engine(step, output, prompt, PaceMeter())
    for num_steps, outputs, prompts in work:
        engine.run(num_steps, outputs=outputs, prompts=prompts)
    if not engine.meter._sums:
        return
    pace = engine.told()
    assert min(pace.seconds_per_step, pace.seconds_per_output_token, pace.seconds_per_prompt_token) >= 0
    if len({(outputs, prompts) for _, outputs, prompts in work}) == 1:
        _, outputs, prompts = work[0]
        assert abs(engine.error(outputs=outputs, prompts=prompts)) < 0.01


def test_fit_is_the_least_of_squares_without_negatives() -> None:
    chance = random.Random(3)
    rows = [[chance.random() for _ in range(NUM_COLUMNS)] for _ in range(40)]
    seconds = [2 * a - 1 * b + 0.5 * c for a, b, c in rows]  # the second column would want to be negative
    squares = [[sum(row[i] * row[j] for row in rows) for j in range(NUM_COLUMNS)] for i in range(NUM_COLUMNS)]
    products = [sum(row[i] * value for row, value in zip(rows, seconds, strict=True)) for i in range(NUM_COLUMNS)]
    found = fit(squares, products)

    def missed(solution: list[float]) -> float:
        return sum(
            (sum(x * v for x, v in zip(row, solution, strict=True)) - value) ** 2
            for row, value in zip(rows, seconds, strict=True)
        )

    assert found[1] == 0 and min(found) >= 0
    for i in (0, 2):
        for change in (-0.02, 0.02):
            other = [value + (change if index == i else 0) for index, value in enumerate(found)]
            assert missed(found) < missed(other)
