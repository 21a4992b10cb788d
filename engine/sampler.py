"""From logits to tokens: processors, filters, noise, logprobs; one draw never disturbs another.

A draw is the token with the largest logit + T * g among those that the filters leave; greedy is T = 0; ties take the
lower id. The order of processors: logit_bias, bad_words, penalties over prompt and output, min_tokens; then top_k,
top_p and min_p on softmax(logit / T). Logprobs are of the raw distribution, before all of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.filters import has_filters, support
from engine.logprobs import position_logprobs
from engine.noise import gumbel_noise, gumbel_noise_of
from engine.params import SamplingParams
from engine.plan import Sampled
from engine.processors import needs_processing, processed
from engine.sequence import Sequence

_NOT_FINITE = "the model's logits are not finite numbers"
_EMPTY = "the request's own settings leave no token to choose from"


@dataclass(frozen=True, slots=True)
class Draw:
    """One token wanted: from row `place` of the logits, for `sequence`."""

    place: int
    sequence: Sequence


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: list[Draw]) -> list[Sampled]:
    """One answer per draw, in order. logits: [L, vocab], fp32; left as they are.

    A draw whose logits hold NaN or infinity, or to which no token is left, answers with `error`; the others are unhurt.
    """
    if not draws:
        return []
    places = sorted({draw.place for draw in draws})
    row_of = {place: row for row, place in enumerate(places)}
    wanted = logits if len(places) == len(logits) else logits[torch.tensor(places, device=logits.device)]
    best, best_ids = wanted.max(dim=-1)  # NaN beats all; among equals the first index wins
    largest, greedy_ids = best.tolist(), best_ids.tolist()
    answers: list[Sampled] = []
    for draw in draws:
        row = row_of[draw.place]
        if not math.isfinite(largest[row]):
            answers.append(Sampled(None, error=_NOT_FINITE))
            continue
        is_plain = draw.sequence.params.is_greedy and not needs_processing(draw.sequence)
        token_id = greedy_ids[row] if is_plain else _choose(wanted[row], draw.sequence)
        answers.append(_answer(wanted[row], token_id, draw.sequence.params))
    return answers


def _answer(logits: torch.Tensor, token_id: int | None, params: SamplingParams) -> Sampled:
    if token_id is None:
        return Sampled(None, error=_EMPTY)
    if params.logprobs is None:
        return Sampled(token_id)
    return Sampled(token_id, position_logprobs(logits[None], [token_id], params.logprobs)[0])


def _choose(logits: torch.Tensor, sequence: Sequence) -> int | None:
    """The token for one row [vocab], or None if no token is left."""
    params = sequence.params
    if needs_processing(sequence):
        logits = processed(logits, sequence)
    if params.is_greedy:
        best, token_id = logits.max(dim=-1)
        return None if best.item() == -torch.inf else int(token_id)
    draw_key = (sequence.seed, sequence.choice, sequence.num_output_tokens)
    if has_filters(params):
        token_ids = support(logits, params)
        if len(token_ids) == 0:
            return None
        noise = gumbel_noise_of(*draw_key, token_ids.cpu().numpy())
        noised = logits[token_ids] + params.temperature * torch.from_numpy(noise).to(logits.device)
        return int(token_ids[noised.argmax()])  # ids ascend, so the first of equals is the lowest
    noise = gumbel_noise(*draw_key, len(logits))
    best, token_id = (logits + params.temperature * torch.from_numpy(noise).to(logits.device)).max(dim=-1)
    return None if best.item() == -torch.inf else int(token_id)
