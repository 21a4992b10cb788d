"""Log-probabilities of the raw model distribution, as they are reported."""

from __future__ import annotations

import torch

from engine.plan import PositionLogprobs, TokenLogprob

_ROWS_AT_ONCE = 64  # bounds the scratch memory: rows * vocabulary * 4 bytes


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
    logprobs = logits.log_softmax(-1)
    chosen_ids = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logits.gather(1, chosen_ids)
    lower = torch.arange(logits.shape[1], device=logits.device) < chosen_ids
    ranks = 1 + ((logits > chosen) | ((logits == chosen) & lower)).sum(-1)
    chosen_logprobs = logprobs.gather(1, chosen_ids).squeeze(1)
    tops = _tops(logits, logprobs, num_top)
    return [
        PositionLogprobs(TokenLogprob(token_id, logprob, rank), top)
        for token_id, logprob, rank, top in zip(token_ids, chosen_logprobs.tolist(), ranks.tolist(), tops, strict=True)
    ]


def _tops(logits: torch.Tensor, logprobs: torch.Tensor, num_top: int) -> list[tuple[TokenLogprob, ...]]:
    if num_top == 0:
        return [()] * len(logits)
    ids = _top_ids(logits, num_top)
    return [
        tuple(TokenLogprob(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(pairs, start=1))
        for pairs in (
            zip(row_ids, row_logprobs, strict=True)
            for row_ids, row_logprobs in zip(ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True)
        )
    ]


def _top_ids(logits: torch.Tensor, num_top: int) -> torch.Tensor:
    """[n, num_top] ids of the largest logits, largest first, equal ones by id."""
    largest, ids = logits.topk(num_top, dim=-1)
    ids = ids.sort(dim=-1).values  # by id first, so that equal ones stay in that order
    ids = ids.gather(1, logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices)
    is_cut_among_equals = (logits >= largest[:, -1:]).sum(-1) > num_top  # topk took any of them
    for row in is_cut_among_equals.nonzero().squeeze(-1).tolist():
        ids[row] = logits[row].sort(descending=True, stable=True).indices[:num_top]
    return ids
