"""Log-probabilities of the raw model distribution, as they are reported."""

from __future__ import annotations

import torch

from engine.plan import PositionLogprobs, TokenLogprob
from engine.rows import ranks, top

_ROWS_AT_ONCE = 16  # bounds the scratch memory (rows * vocabulary * 4 bytes), and keeps it in the cache


@torch.inference_mode()
def position_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[PositionLogprobs]:
    """For each row of logits [n, vocab], fp32: the given token and the `num_top` likeliest. Rank 1 is the likeliest;
    equal ones rank by id.
    """
    found: list[PositionLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        found.extend(_some(logits[start : start + _ROWS_AT_ONCE], token_ids[start : start + _ROWS_AT_ONCE], num_top))
    return found


def _some(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[PositionLogprobs]:
    chosen_ids = torch.tensor(token_ids, device=logits.device)[:, None]
    top_ids = top(logits, num_top)
    all_ids = torch.cat((chosen_ids, top_ids), dim=1)
    found = []
    for row_ids, logprobs, rank in zip(
        all_ids.tolist(),
        logits.log_softmax(-1).gather(1, all_ids).tolist(),
        ranks(logits, chosen_ids).tolist(),
        strict=True,
    ):
        chosen, *likeliest = zip(row_ids, logprobs, (rank, *range(1, num_top + 1)), strict=True)
        found.append(PositionLogprobs(TokenLogprob(*chosen), tuple(TokenLogprob(*each) for each in likeliest)))
    return found
