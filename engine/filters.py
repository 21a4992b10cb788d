"""Which tokens may be drawn: top_k, top_p and min_p, in this order, on softmax(logit / T).

Tokens are ranked by logit, equal ones by id.
    top_k   the first k of the ranking
    top_p   of those, as many from the top as reach a share p of their probability, the one that crosses it included
    min_p   of those, the ones at least min_p times as likely as the most likely

A row is handled by itself, from its values alone: how many tokens stay and the least logit among them name the support,
so nothing but numbers is ever sorted, and of those only the top where it is enough.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.params import SamplingParams

Row = npt.NDArray[np.float32]  # [vocab]
_FIRST_GUESS = 512  # how many top logits are sorted for a top_p before all are


def has_filters(params: SamplingParams) -> bool:
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0


def support(logits: Row, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Ids that the filters leave of one row, ascending; -inf never stays. At least one logit is finite."""
    best = float(logits.max())
    least = -math.inf
    num_left = len(logits)
    if params.top_k:
        num_left = min(params.top_k, num_left)
    if params.top_p < 1.0:
        num_left = _nucleus_size(logits, best, num_left, params)
    if num_left < len(logits):
        least = np.partition(logits, len(logits) - num_left)[len(logits) - num_left]
    kept = np.flatnonzero((logits >= least) & (logits > -np.inf))
    if len(kept) > num_left:  # of several that equal the least, the last ones go
        is_least = logits[kept] == least
        kept = np.concatenate((kept[~is_least], kept[is_least][: num_left - len(kept)]))
        kept.sort()
    if params.min_p > 0.0:
        floor = np.float32(best + params.temperature * math.log(params.min_p))
        kept = kept[logits[kept] >= floor]
    return kept


def _nucleus_size(logits: Row, best: float, top_k: int, params: SamplingParams) -> int:
    """How many tokens from the top have less than `top_p` of the probability of the first `top_k` before them."""
    for num_sorted in (min(_FIRST_GUESS, top_k), top_k):
        start = len(logits) - num_sorted
        ranked = np.sort(np.partition(logits, start)[start:])[::-1]
        reached = _weights(ranked, best, params).cumsum()
        is_all = num_sorted == top_k
        whole = reached[-1] if is_all else _weights(_top(logits, top_k), best, params).sum()
        if is_all or reached[-1] >= params.top_p * whole:
            break
    return 1 + int(np.searchsorted(reached[:-1], params.top_p * whole, side="left"))


def _top(logits: Row, count: int) -> Row:
    start = len(logits) - count
    return np.partition(logits, start)[start:] if start else logits


def _weights(logits: Row, best: float, params: SamplingParams) -> npt.NDArray[np.float64]:
    return np.exp((logits.astype(np.float64) - best) / params.temperature)
