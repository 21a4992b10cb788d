"""Verification by rejection: decides about drafted rows after all draws of a step are made as if coupled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.logprobs import position_logprobs
from engine.noise import DrawKey
from engine.plan import Row, Sampled
from engine.processors import processed
from engine.row_places import first_logits
from engine.speculation.rejection import decide

if TYPE_CHECKING:
    import torch

    from engine.drafter import DraftLogits


def reject(logits: torch.Tensor, rows: list[Row], samples: list[Sampled], drafts: DraftLogits) -> list[Sampled]:
    """`samples`, with those at the places of proposals replaced; greedy ones stay, which accept what is equal.

    logits: [L, vocab], fp32, of all rows; `drafts`: of the proposals that a model drew.
    """
    decided = samples.copy()
    at = 0
    for index, (row, first) in enumerate(zip(rows, first_logits(rows), strict=True)):
        if not row.sequence.params.is_greedy:
            for place in range(row.num_proposals):
                if samples[at + place].token_id is not None:
                    decided[at + place] = _decided(logits[first + place], row, place, drafts.get((index, place)))
        at += row.num_samples
    return decided


def _decided(logits: torch.Tensor, row: Row, place: int, draft: torch.Tensor | None) -> Sampled:
    sequence = row.sequence.ahead(row.proposals[:place])
    key = DrawKey(sequence.seed, sequence.choice, sequence.num_output_tokens)
    token_id = decide(
        processed(logits, sequence).cpu().numpy(),
        None if draft is None else draft.cpu().numpy(),
        row.proposals[place],
        sequence.params,
        key,
    )
    num_top = sequence.num_logprobs
    return Sampled(token_id, None if num_top is None else position_logprobs(logits[None], [token_id], num_top)[0])
