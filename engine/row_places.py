"""Where the rows of a plan find their logits among those of the whole step, which lie row by row."""

from __future__ import annotations

from itertools import accumulate

import torch

from engine.logprobs import position_logprobs
from engine.plan import PositionLogprobs, Row
from engine.processors import needs_processing
from engine.sampler import Draw
from engine.sequence import Sequence


def first_logits(rows: list[Row]) -> list[int]:
    """Where each row's logits begin."""
    return [0, *accumulate(row.num_logits for row in rows)][: len(rows)]


def draws_of(rows: list[Row]) -> list[Draw]:
    """All draws of the step, row by row."""
    return [draw for row, first in zip(rows, first_logits(rows), strict=True) for draw in _draws(row, first)]


def _draws(row: Row, first: int) -> list[Draw]:
    """Without proposals, the row's sequences draw from its last logits.

    With K of them its sequence draws at each of the last 1 + K places, at place j as if proposals before j were output:
    so penalties, forbidden words, the least length and the noise are those that the token would meet if it were decoded
    alone.
    """
    if not row.num_proposals:
        return [Draw(first + row.num_logits - 1, sequence, row.num_pending) for sequence in row.draws]
    return [Draw(first + place, _ahead(row.sequence, row.proposals[:place])) for place in range(row.num_logits)]


def _ahead(sequence: Sequence, proposals: list[int]) -> Sequence:
    """The sequence itself where its draws do not look at its output: copying that is spared."""
    is_blind = sequence.params.is_greedy and not needs_processing(sequence)
    return sequence if is_blind else sequence.ahead(proposals)


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
