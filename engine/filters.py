"""Which tokens may be drawn: top_k, top_p and min_p, in this order, on softmax(logit / T).

Tokens are ranked by logit, equal ones by id.
    top_k   the first k of the ranking
    top_p   of those, as many from the top as reach a share p of their probability, the one that crosses it included
    min_p   of those, the ones at least min_p times as likely as the most likely
"""

from __future__ import annotations

import math

import torch

from engine.params import SamplingParams

_FIRST_GUESS = 512  # how many top tokens are ranked before the whole vocabulary is


def has_filters(params: SamplingParams) -> bool:
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0


def support(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Ids [n] of the tokens that the filters leave of one row [vocab], ascending; empty where every logit is -inf."""
    best = float(logits.max())
    if best == -torch.inf:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    if params.top_k or params.top_p < 1.0:
        kept = _ranked_top(logits, params.top_k, params.top_p, params.temperature).sort().values
    else:
        kept = torch.arange(len(logits), device=logits.device)
    if params.min_p > 0.0:
        floor = best + params.temperature * math.log(params.min_p)
        kept = kept[logits[kept] >= floor]
    return kept


def _ranked_top(logits: torch.Tensor, top_k: int, top_p: float, temperature: float) -> torch.Tensor:
    """Ids left by top_k and then top_p; ranks only the top of the vocabulary where that is enough."""
    num_tokens = len(logits)
    if top_k:
        ranked = _rank(logits, min(top_k, num_tokens))
        return ranked if top_p >= 1.0 else _nucleus(logits, ranked, top_p, temperature)
    if num_tokens > _FIRST_GUESS:
        total = torch.logsumexp(logits.double() / temperature, dim=-1)
        ranked = _rank(logits, _FIRST_GUESS)
        if (logits[ranked].double() / temperature - total).exp().sum() > top_p:
            return _nucleus(logits, ranked, top_p, temperature, total)
    return _nucleus(logits, _rank(logits, num_tokens), top_p, temperature)


def _rank(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest logits, largest first, equal ones by id."""
    least = logits.topk(count).values[-1]
    candidates = (logits >= least).nonzero().squeeze(-1)  # ascending, and a few more where several equal the least
    order = logits[candidates].sort(descending=True, stable=True).indices
    ranked = candidates[order[:count]]
    return ranked[logits[ranked] > -torch.inf]


def _nucleus(
    logits: torch.Tensor, ranked: torch.Tensor, top_p: float, temperature: float, total: torch.Tensor | None = None
) -> torch.Tensor:
    """The head of `ranked` before which less than `top_p` of the probability lies. `total`: log of the normalizer,
    that of `ranked` itself where it is not given.
    """
    scaled = logits[ranked].double() / temperature
    probability = (scaled - (torch.logsumexp(scaled, dim=-1) if total is None else total)).exp()
    before = probability.cumsum(-1) - probability
    return ranked[before < top_p]
