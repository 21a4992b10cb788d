"""From logits to tokens: processors, filters, noise, logprobs; one draw never disturbs another.

A draw is the token with the largest logit + T * g among those that the filters leave; greedy is T = 0; ties take the
lower id. The order of processors: logit_bias, bad_words, penalties over prompt and output, min_tokens, the grammar;
then top_k, top_p and min_p on softmax(logit / T). Logprobs are of the raw distribution, before all of that.

Draws that need the same are made together, each row to the bit as if it were alone:

    plain greedy          the raw row's largest; so with a grammar that allows it
    greedy                the processed row's largest
    temperature only      gumbel_max.draw_from_all
    filters               filters.support, then gumbel_max.draw_from_some

Beams draw nothing; `engine.beam_sampler` answers for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.filters import has_filters, support
from engine.gumbel_max import draw_from_all, draw_from_some
from engine.logprobs import position_logprobs
from engine.noise import DrawKey
from engine.plan import PositionLogprobs, Sampled
from engine.processors import is_only_guided, needs_processing, process
from engine.rows import largest, values_at
from engine.sequence import Sequence

NOT_FINITE = "the model's logits are not finite numbers"
EMPTY = "the request's own settings leave no token to choose from"


@dataclass(frozen=True, slots=True)
class Draw:
    """One token wanted: from row `place` of the logits, for `sequence`."""

    place: int
    sequence: Sequence
    num_pending: int = 0  # output tokens that are drawn before this one and that the sequence does not have yet

    @property
    def output_index(self) -> int:
        """Which of the sequence's output tokens it will be: part of the noise's key."""
        return self.sequence.num_output_tokens + self.num_pending


def sample(logits: torch.Tensor, draws: list[Draw], best_ids: npt.NDArray[np.int32] | None = None) -> list[Sampled]:
    """One answer per draw, in order. logits: [L, vocab], fp32; left as they are. best_ids: [L], of each row's largest
    logit, where they are known.

    A draw whose logits hold NaN or infinity, or to which no token is left, answers with `error`; the others are unhurt.
    """
    if not draws:
        return []
    rows = _rows_of(logits, draws)
    best, ids = largest(rows) if best_ids is None else values_at(rows, best_ids[[draw.place for draw in draws]])
    is_sound = [math.isfinite(value) for value in best]  # NaN beats all
    token_ids: list[int | None] = list(ids)
    drawn = [i for i, draw in enumerate(draws) if is_sound[i] and not _is_plain(draw.sequence, ids[i])]
    if drawn:
        chosen = _choose(rows if len(drawn) == len(draws) else rows[drawn], [draws[i] for i in drawn])
        for i, token_id in zip(drawn, chosen, strict=True):
            token_ids[i] = token_id
    logprobs = _logprobs(rows, draws, {i: t for i, t in enumerate(token_ids) if is_sound[i] and t is not None})
    return [
        Sampled(token_id, logprobs.get(i), why_none(draws[i].sequence) if token_id is None else None)
        if is_sound[i]
        else Sampled(None, error=NOT_FINITE)
        for i, token_id in enumerate(token_ids)
    ]


def why_none(sequence: Sequence) -> str:
    """The error of a draw to which no token is left."""
    return sequence.matcher.error or EMPTY if sequence.matcher is not None else EMPTY


def _rows_of(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """[len(draws), vocab]: each draw's row; the logits themselves where each row has one draw, in order."""
    places = [draw.place for draw in draws]
    if places == list(range(len(logits))):
        return logits
    return logits[torch.tensor(places, device=logits.device)]


def _is_plain(sequence: Sequence, best_id: int) -> bool:
    """Whether the draw is the raw row's largest. To ask a grammar about one token is cheap beside a mask."""
    if sequence.matcher is None:
        return sequence.params.is_greedy and not needs_processing(sequence)
    return is_only_guided(sequence) and sequence.matcher.may_follow(sequence.output_token_ids, best_id)


@torch.inference_mode()
def _choose(logits: torch.Tensor, draws: list[Draw]) -> list[int | None]:
    """The token for each draw's row [n, vocab], or None where none is left."""
    sequences = [draw.sequence for draw in draws]
    if any(needs_processing(sequence) for sequence in sequences):
        logits = logits.clone()
        process(logits, sequences)
    best, best_ids = largest(logits)
    chosen: list[int | None] = [
        token_id if value > -math.inf else None for value, token_id in zip(best, best_ids, strict=True)
    ]
    rows = [row for row, each in enumerate(sequences) if chosen[row] is not None and not each.params.is_greedy]
    if not rows:
        return chosen
    host, host_ids = logits.cpu().numpy(), np.array(best_ids)  # noise is drawn on the CPU
    for is_filtered in (False, True):
        group = [row for row in rows if has_filters(sequences[row].params) is is_filtered]
        if not group:
            continue
        params = [sequences[row].params for row in group]
        keys = [DrawKey(sequences[row].seed, sequences[row].choice, draws[row].output_index) for row in group]
        temperatures = [each.temperature for each in params]
        part = host if len(group) == len(host) else host[group]
        if is_filtered:
            supports = [support(row, each) for row, each in zip(part, params, strict=True)]
            drawn = draw_from_some(part, supports, keys, temperatures)
        else:
            drawn = draw_from_all(part, host_ids[group], keys, temperatures)
        for row, token_id in zip(group, drawn, strict=True):
            chosen[row] = token_id
    return chosen


def _logprobs(rows: torch.Tensor, draws: list[Draw], token_ids: dict[int, int]) -> dict[int, PositionLogprobs]:
    """Of the draws that ask for them; `token_ids`: the tokens drawn."""
    wanted = {i: count for i in token_ids if (count := draws[i].sequence.num_logprobs) is not None}
    if not wanted:
        return {}
    asking = list(wanted)
    found = position_logprobs(rows[asking], [token_ids[i] for i in asking], max(wanted.values()))
    return {i: PositionLogprobs(each.chosen, each.top[: wanted[i]]) for i, each in zip(asking, found, strict=True)}
