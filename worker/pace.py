"""What a step of this worker's engine takes, fitted to what was measured. Pure.

    seconds = steps * s + outputs * o + prompts * p        s, o, p >= 0

One batch size alone cannot tell `s` from `o`. So the sums behind the fit are kept apart by batch size, and those of
sizes that have not been seen for a while stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from infra.contracts import Pace

if TYPE_CHECKING:
    from engine.stats import EngineStats

WINDOW_SECONDS = 0.2  # of work; measured together, so that hiccups average out
KEEP = 0.9  # of a batch size's older windows, at each new one of it
RIDGE = 1e-4  # of each column's own size: decides between columns that cannot be told apart
NUM_COLUMNS = 3  # steps, output tokens, prompt tokens


@dataclass(slots=True)
class _Sums:
    """Of one batch size: the normal equations of its windows, the newest weighing most."""

    squares: list[list[float]] = field(default_factory=lambda: [[0.0] * NUM_COLUMNS for _ in range(NUM_COLUMNS)])
    products: list[float] = field(default_factory=lambda: [0.0] * NUM_COLUMNS)

    def add(self, counts: Sequence[float], seconds: float) -> None:
        for i, one in enumerate(counts):
            for j, other in enumerate(counts):
                self.squares[i][j] = KEEP * self.squares[i][j] + one * other
            self.products[i] = KEEP * self.products[i] + one * seconds


class PaceMeter:
    """Takes an engine's counters after each step."""

    def __init__(self) -> None:
        self._seen = (0, 0, 0)
        self._busy_seconds = 0.0
        self._sums: dict[tuple[int, bool], _Sums] = {}

    def note(self, stats: EngineStats, busy_seconds: float) -> None:
        """`busy_seconds`: how long the engine has worked since the last note."""
        self._busy_seconds += busy_seconds
        if self._busy_seconds < WINDOW_SECONDS:
            return
        totals = (stats.num_steps, stats.num_generated_tokens, stats.num_computed_tokens - stats.num_generated_tokens)
        steps, outputs, prompts = (max(0, now - before) for now, before in zip(totals, self._seen, strict=True))
        seconds, self._busy_seconds, self._seen = self._busy_seconds, 0.0, totals
        if steps == 0:
            return
        size = round(math.log2(max(1.0, outputs / steps)))
        sums = self._sums.setdefault((size, prompts > outputs), _Sums())
        # As of one second, so that every window weighs the same.
        sums.add([steps / seconds, outputs / seconds, prompts / seconds], 1.0)

    def pace(self, *, num_seats: int, kv_tokens: int) -> Pace | None:
        """None until something is measured."""
        if not self._sums:
            return None
        all_sums = list(self._sums.values())
        squares = [[sum(one.squares[i][j] for one in all_sums) for j in range(NUM_COLUMNS)] for i in range(NUM_COLUMNS)]
        products = [sum(one.products[i] for one in all_sums) for i in range(NUM_COLUMNS)]
        step, output, prompt = fit(squares, products)
        return Pace(
            seconds_per_step=step,
            seconds_per_output_token=output,
            seconds_per_prompt_token=prompt,
            num_seats=num_seats,
            kv_tokens=kv_tokens,
        )


def fit(squares: Sequence[Sequence[float]], products: Sequence[float]) -> list[float]:
    """The non-negative least squares of three columns: the best of all subsets whose own solution is not negative."""
    best, least = [0.0] * NUM_COLUMNS, 0.0
    used = [i for i in range(NUM_COLUMNS) if squares[i][i] > 0]
    for size in range(1, len(used) + 1):
        for subset in combinations(used, size):
            matrix = [[squares[i][j] + (RIDGE * squares[i][i] if i == j else 0.0) for j in subset] for i in subset]
            solution = _solved(matrix, [products[i] for i in subset])
            if solution is None or min(solution) < 0:
                continue
            error = -sum(value * products[i] for value, i in zip(solution, subset, strict=True))
            if error < least:
                best, least = [0.0] * NUM_COLUMNS, error
                for value, i in zip(solution, subset, strict=True):
                    best[i] = value
    return best


def _solved(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss, with the largest pivot; None for a singular matrix."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        if rows[pivot][column] == 0:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(size):
            if index != column:
                factor = rows[index][column] / rows[column][column]
                rows[index] = [a - factor * b for a, b in zip(rows[index], rows[column], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]
