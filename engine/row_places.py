"""Where the rows of a plan find their logits among those of the whole step, which lie row by row."""

from __future__ import annotations

from itertools import accumulate

import torch

from engine.logprobs import position_logprobs
from engine.plan import PositionLogprobs, Row
from engine.sampler import Draw


def first_logits(rows: list[Row]) -> list[int]:
    """Where each row's logits begin."""
    return [0, *accumulate(row.num_logits for row in rows)][: len(rows)]


def draws_of(rows: list[Row]) -> list[Draw]:
    """All draws of the step: each from the last logits of its row."""
    return [
        Draw(first + row.num_logits - 1, sequence)
        for row, first in zip(rows, first_logits(rows), strict=True)
        for sequence in row.draws
    ]


def prompt_logprobs(rows: list[Row], logits: torch.Tensor) -> dict[int, list[PositionLogprobs]]:
    """By row, for those that ask: about the prompt tokens after the row's last `num_logits` positions."""
    found = {}
    for index, (row, first) in enumerate(zip(rows, first_logits(rows), strict=True)):
        num_top = row.sequence.params.prompt_logprobs
        if num_top is not None:
            start = row.end - row.num_logits
            targets = row.sequence.prompt_token_ids[start + 1 : row.end + 1]
            found[index] = position_logprobs(logits[first : first + len(targets)], targets, num_top)
    return found
