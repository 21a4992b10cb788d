"""What a task's output has of its prompt."""

from __future__ import annotations

import pytest

from bench.extraction import TASKS, share_copied


@pytest.mark.parametrize(
    ("output", "share"),
    [
        ([3, 4, 5, 6], 1.0),
        ([3, 4, 5], 0.0),  # three tokens may be the same by chance
        ([9, 3, 4, 5, 6, 9], 4 / 6),
        ([3, 4, 5, 6, 5, 6, 7, 8], 1.0),  # two runs
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2], 0.8),
        ([], 0.0),
    ],
)
def test_runs_of_four_tokens_that_stand_in_the_prompt_are_copied(output: list[int], share: float) -> None:
    assert share_copied([1, 2, 3, 4, 5, 6, 7, 8], output) == pytest.approx(share)


def test_every_task_asks_as_often_as_it_is_told() -> None:
    for task in TASKS.values():
        assert len({ask.message for ask in task(5)}) == 5
