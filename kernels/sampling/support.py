"""Which tokens top_k, top_p and min_p leave, for a batch of draws: in torch's operators, on whatever device.

Tokens are ranked by logit, equal ones by id; then, on softmax(logit / T),
    top_k   the first k of the ranking
    top_p   of those, as many from the top as reach a share p of their probability, the one that crosses it included
    min_p   of those, the ones at least min_p times as likely as the most likely
"""

from __future__ import annotations

import math

import torch

from kernels.sampling.draws import Support

_ROWS_AT_ONCE = 32  # bounds the scratch memory: about 40 bytes a row and token


def support(
    logits: torch.Tensor, temperatures: list[float], top_ks: list[int], top_ps: list[float], min_ps: list[float]
) -> Support:
    """logits: [draws, vocab], fp32; lists: one entry a draw; top_k 0, top_p 1 and min_p 0 leave all."""
    num_draws, vocab = logits.shape
    floors = torch.full((num_draws,), -math.inf, dtype=torch.float32, device=logits.device)
    last_ids = torch.full((num_draws,), vocab, dtype=torch.int64, device=logits.device)
    filtered = [row for row in range(num_draws) if top_ks[row] or top_ps[row] < 1.0 or min_ps[row] > 0.0]
    for start in range(0, len(filtered), _ROWS_AT_ONCE):
        rows = filtered[start : start + _ROWS_AT_ONCE]
        places = torch.tensor(rows, device=logits.device)
        ranked, ids = logits[places].sort(dim=-1, descending=True, stable=True)
        temperature, top_p, min_p = (_column(each, rows, logits.device) for each in (temperatures, top_ps, min_ps))
        top_k = torch.tensor([min(top_ks[row] or vocab, vocab) for row in rows], device=logits.device)[:, None]
        num_left = _num_left(ranked, temperature, top_k, top_p, min_p)
        floors[places] = ranked.gather(1, num_left - 1).squeeze(1)
        last_ids[places] = ids.gather(1, num_left - 1).squeeze(1)
    return Support(floors, last_ids)


def _num_left(
    ranked: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """[rows, 1]: how many of the ranking stay. All but `ranked` [rows, vocab] are [rows, 1]."""
    best = ranked[:, :1]
    is_first = torch.arange(ranked.shape[1], device=ranked.device) < top_k
    weights = ((ranked.double() - best) / temperature).exp() * is_first
    reached = weights.cumsum(-1)
    is_short = (reached < top_p * weights.sum(-1, keepdim=True)) & is_first
    num_left = torch.where(top_p < 1.0, 1 + is_short.sum(-1, keepdim=True), top_k).minimum(top_k)
    floor = (best + temperature * min_p.log()).float()  # -inf where there is no min_p
    return num_left.minimum((ranked >= floor).sum(-1, keepdim=True)).clamp(min=1)


def _column(values: list[float], rows: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([values[row] for row in rows], dtype=torch.float64, device=device)[:, None]
