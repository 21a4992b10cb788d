"""Answers for beams: their likeliest continuations, for all beams of a step at once; ordinary draws beside them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from engine.logprobs import position_logprobs
from engine.plan import Candidate, PositionLogprobs, Sampled
from engine.processors import needs_processing, process
from engine.rows import largest, top
from engine.sampler import NOT_FINITE, Draw, sample
from engine.sequence import Sequence


def answer(logits: torch.Tensor, draws: list[Draw], best_ids: npt.NDArray[np.int32] | None = None) -> list[Sampled]:
    """One answer per draw, in order: a token, or a beam's candidates. logits: [L, vocab], fp32; left as they are.

    best_ids: [L], where they are known: of each row's largest logit.
    """
    beams = of_beams(draws, True)
    if not beams:
        return sample(logits, draws, best_ids)
    return in_order(draws, sample(logits, of_beams(draws, False), best_ids), name_candidates(logits, beams))


def of_beams(draws: list[Draw], wanted: bool) -> list[Draw]:
    """The draws that are, or are not, for beams."""
    return [draw for draw in draws if (draw.sequence.request.beams is not None) is wanted]


def in_order(draws: list[Draw], drawn: list[Sampled], named: list[Sampled]) -> list[Sampled]:
    """Answers of ordinary draws and of beams, in the order of all `draws`."""
    if not named:
        return drawn
    tokens, candidates = iter(drawn), iter(named)
    return [next(candidates if draw.sequence.request.beams is not None else tokens) for draw in draws]


@torch.inference_mode()
def name_candidates(logits: torch.Tensor, draws: list[Draw]) -> list[Sampled]:
    """The candidates of beams' draws; an error for one whose logits hold NaN or infinity. logits: [L, vocab], fp32."""
    rows = logits[torch.tensor([draw.place for draw in draws], device=logits.device)]
    sound = [index for index, value in enumerate(largest(rows)[0]) if math.isfinite(value)]
    named = [Sampled(None, error=NOT_FINITE) for _ in draws]
    if sound:
        found = beam_candidates(rows[sound], [draws[index].sequence for index in sound])
        for index, candidates in zip(sound, found, strict=True):
            named[index] = Sampled(None, candidates=candidates)
    return named


def beam_candidates(logits: torch.Tensor, sequences: list[Sequence]) -> list[list[Candidate]]:
    """Of each row's sequence the `num_candidates` heaviest tokens, heaviest first, equal ones by id.

    logits: [n, vocab], fp32, finite but for -inf; left as they are. Processors act on log-softmax, as in transformers.
    """
    logprobs = logits.log_softmax(-1)
    weights = logprobs
    if any(needs_processing(sequence) for sequence in sequences):
        weights = logprobs.clone()
        process(weights, sequences)
    counts = [min(_num_candidates(sequence), logits.shape[1]) for sequence in sequences]
    ids = top(weights, max(counts))
    columns = [each.tolist() for each in (ids, weights.gather(1, ids), logprobs.gather(1, ids))]
    found = []
    for row, (count, sequence) in enumerate(zip(counts, sequences, strict=True)):
        token_ids, its_weights, its_logprobs = (column[row][:count] for column in columns)
        reported = _reported(logits[row], token_ids, sequence.params.logprobs)
        found.append(list(map(Candidate, token_ids, its_weights, its_logprobs, reported)))
    return found


def _num_candidates(sequence: Sequence) -> int:
    beams = sequence.request.beams
    assert beams is not None
    return beams.num_candidates


def _reported(row: torch.Tensor, token_ids: list[int], num_top: int | None) -> list[PositionLogprobs] | list[None]:
    """What is said of each token where the request asks for logprobs."""
    if num_top is None:
        return [None] * len(token_ids)
    return position_logprobs(row.expand(len(token_ids), -1), token_ids, num_top)
