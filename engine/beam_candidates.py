"""The likeliest continuations of beams, for all beams of a step at once."""

from __future__ import annotations

import torch

from engine.logprobs import position_logprobs
from engine.plan import Candidate, PositionLogprobs
from engine.processors import needs_processing, process
from engine.rows import top
from engine.sequence import Sequence


@torch.inference_mode()
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
