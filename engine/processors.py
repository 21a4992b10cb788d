"""What changes logits before a token is drawn: biases, forbidden words, penalties, the least length.

Penalties as vLLM defines them, over the sequence's own tokens:

    repetition   of prompt and output: a positive logit is divided by it, a negative one multiplied
    frequency    subtracted once for each time the token is in the output
    presence     subtracted once if the token is in the output
"""

from __future__ import annotations

from collections import Counter

import torch

from engine.sequence import Sequence


def needs_processing(sequence: Sequence) -> bool:
    params = sequence.params
    return bool(
        params.logit_bias
        or sequence.request.bad_word_token_ids
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or sequence.num_output_tokens < params.min_tokens
    )


def processed(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """A new row [vocab] for the sequence's next token; -inf for what it must not be."""
    logits = logits.clone()
    params = sequence.params
    if params.logit_bias:
        logits[list(params.logit_bias)] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    forbidden = _completing_bad_words(sequence)
    if forbidden:
        logits[forbidden] = -torch.inf
    _penalize(logits, sequence)
    if sequence.num_output_tokens < params.min_tokens and sequence.request.stop_token_ids:
        logits[sorted(sequence.request.stop_token_ids)] = -torch.inf
    return logits


def _completing_bad_words(sequence: Sequence) -> list[int]:
    """Tokens that would complete a bad word whose beginning the output ends in."""
    output = sequence.output_token_ids
    found = []
    for *beginning, last in sequence.request.bad_word_token_ids:
        num_needed = len(beginning)
        if num_needed <= len(output) and output[len(output) - num_needed :] == beginning:
            found.append(last)
    return found


def _penalize(logits: torch.Tensor, sequence: Sequence) -> None:
    """In place."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = sorted({*sequence.prompt_token_ids, *sequence.output_token_ids})
        values = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    if (params.frequency_penalty or params.presence_penalty) and sequence.output_token_ids:
        counts = Counter(sequence.output_token_ids)
        times = torch.tensor(list(counts.values()), device=logits.device)
        logits[list(counts)] -= params.frequency_penalty * times + params.presence_penalty
