"""Coupled verification in Triton's interpreter against the reference, and the reference against examples."""

from __future__ import annotations

import random

import torch

from kernels.verify import reference
from tests.kernels.interpreted import KERNELS, poisoned

__all__ = ["poisoned"]

verify = KERNELS["verify"]


def count(
    proposals: list[list[int]], targets: list[list[int]], failed: frozenset[tuple[int, int]] = frozenset()
) -> list[int]:
    """The kernel's counts, checked against the reference's. failed: (sequence, place) of draws without a token."""
    starts = [0]
    for proposed in proposals:
        starts.append(starts[-1] + len(proposed))
    is_token = [(i, j) not in failed for i, drawn in enumerate(targets) for j in range(len(drawn))]
    arguments = (
        torch.tensor([token for drawn in targets for token in drawn], dtype=torch.int64),
        torch.tensor(is_token, dtype=torch.bool),
        torch.tensor([token for proposed in proposals for token in proposed], dtype=torch.int64),
        torch.tensor(starts),
    )
    found = verify.count_accepted(*arguments)
    assert torch.equal(found, reference.count_accepted(*arguments))
    return [int(number) for number in found]


def test_examples() -> None:
    assert count([[5, 6, 7]], [[5, 6, 7, 8]]) == [3]
    assert count([[5, 6, 7]], [[5, 9, 7, 8]]) == [1]
    assert count([[5]], [[4, 1]]) == [0]
    assert count([[]], [[4]]) == [0]
    assert count([], []) == []
    assert count([[], [1, 2], [3]], [[9], [1, 2, 0], [4, 4]]) == [0, 2, 0]


def test_a_failed_draw_accepts_nothing_from_there_on() -> None:
    assert count([[5, 6, 7]], [[5, 6, 7, 8]], frozenset({(0, 1)})) == [1]
    assert count([[5, 6], [1]], [[5, 6, 7], [1, 2]], frozenset({(0, 2), (1, 0)})) == [2, 0]


def test_ragged_and_long() -> None:
    dice = random.Random(3)
    proposals = [[dice.randrange(9) for _ in range(n)] for n in (0, 1, 31, 32, 33, 70, 5, 64)]
    targets = [[*proposed, 0] for proposed in proposals]
    assert count(proposals, targets) == [len(proposed) for proposed in proposals]
    for drawn in targets[1:]:
        place = dice.randrange(len(drawn) - 1)
        drawn[place] += 1
    found = count(proposals, targets)
    assert all(accepted < len(proposed) for accepted, proposed in zip(found[1:], proposals[1:], strict=True))
