"""Lossless rejection (Leviathan et al., 2023; Chen et al., 2023). Pure.

A proposal x, drawn from q, is output with probability min(1, p(x) / q(x)), p being the target's distribution. Else the
token is drawn from max(0, p - q), normed. Either way the token is distributed as p:

    q(x) min(1, p(x) / q(x))  +  P(rejected) * max(0, p(x) - q(x)) / sum max(0, p - q)  =  p(x)

A proposer without a distribution is one that is certain: q(x) = 1, and the rest is p without x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.filters import has_filters, support
from engine.noise import DrawKey, gumbel, words_at

if TYPE_CHECKING:
    from engine.params import SamplingParams

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]

_ACCEPTS, _REDRAWS = 1, 2  # uses of noise, beside the draw itself


def decide(logits: Logits, draft_logits: Logits | None, proposal: int, params: SamplingParams, key: DrawKey) -> int:
    """The token that is output: the proposal, or another.

    logits, draft_logits: [vocab], processed; None: the proposer was certain. `key`: of the draw at this place.
    """
    target = probabilities(logits, params)
    if draft_logits is None:
        draft = np.zeros_like(target)
        draft[proposal] = 1.0
    else:
        draft = probabilities(draft_logits, params)
    if _uniform(key._replace(use=_ACCEPTS)) * draft[proposal] < target[proposal]:
        return proposal
    rest = np.maximum(0.0, target - draft)
    ids = np.flatnonzero(rest)
    if not len(ids):  # p and q differ by rounding alone
        return proposal
    noise = gumbel(words_at([key._replace(use=_REDRAWS)], np.zeros_like(ids), ids))
    return int(ids[(np.log(rest[ids]) + noise).argmax()])


def probabilities(logits: Logits, params: SamplingParams) -> Floats:
    """[vocab]: what a direct draw at this temperature and with these filters is distributed as."""
    ids = support(logits, params) if has_filters(params) else np.flatnonzero(logits > -np.inf)
    scaled = logits[ids].astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled.max())
    found = np.zeros(len(logits))
    found[ids] = weights / weights.sum()
    return found


def _uniform(key: DrawKey) -> float:
    """In (0, 1)."""
    zero = np.zeros(1, dtype=np.int64)
    return (float(words_at([key], zero, zero)[0]) + 0.5) / 2**32
