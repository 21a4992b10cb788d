"""What changes logits before a token is drawn: biases, forbidden words, penalties, the least length, the grammar.

Penalties as vLLM defines them, over the sequence's own tokens:

    repetition   of prompt and output: a positive logit is divided by it, a negative one multiplied
    frequency    subtracted once for each time the token is in the output
    presence     subtracted once if the token is in the output

All rows of a step are changed together: each processor first lists its (row, token) pairs, then changes them at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain

import numpy as np
import torch

from engine.sequence import Sequence


def needs_processing(sequence: Sequence) -> bool:
    return sequence.matcher is not None or _is_changed(sequence)


def is_only_guided(sequence: Sequence) -> bool:
    """Whether a draw takes the largest of what the grammar leaves: the raw row's largest, where it may come."""
    return sequence.matcher is not None and sequence.params.is_greedy and not _is_changed(sequence)


def _is_changed(sequence: Sequence) -> bool:
    """Whether anything but a grammar changes its logits."""
    params = sequence.params
    return bool(
        params.logit_bias
        or sequence.request.bad_word_token_ids
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or sequence.num_output_tokens < params.min_tokens
    )


def process(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    """In place, logits [n, vocab] for the next token of each row's sequence; -inf for what it must not be."""
    _bias(logits, sequences)
    _forbid(logits, [completing_bad_words(sequence) for sequence in sequences])
    _penalize_repetition(logits, sequences)
    _penalize_output(logits, sequences)
    _forbid(logits, [barred_stops(sequence) for sequence in sequences])
    _guide(logits, sequences)


def processed(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """A new row [vocab] for one sequence."""
    row = logits[None].clone()
    process(row, [sequence])
    return row[0]


class _Pairs:
    """Places (row, token) of logits [n, vocab]. A token that is listed twice in a row must be given the same value."""

    def __init__(self, logits: torch.Tensor, token_ids: list[Collection[int]]) -> None:
        """`token_ids`: of each row."""
        self._logits = logits
        lens = [len(ids) for ids in token_ids]
        rows = np.repeat(np.arange(len(lens)), lens)
        ids = np.fromiter(chain.from_iterable(token_ids), dtype=np.int64, count=len(rows))
        self.rows, self.ids = (torch.from_numpy(each).to(logits.device) for each in (rows, ids))

    @property
    def values(self) -> torch.Tensor:
        return self._logits[self.rows, self.ids]

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        self._logits[self.rows, self.ids] = values

    def of_rows(self, numbers: list[float]) -> torch.Tensor:
        """Each row's number, for each of its pairs; fp32."""
        return torch.tensor(numbers, dtype=torch.float32, device=self._logits.device)[self.rows]


def _bias(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    biases = [sequence.params.logit_bias or {} for sequence in sequences]
    if any(biases):
        pairs = _Pairs(logits, list(biases))
        values = [value for bias in biases for value in bias.values()]
        pairs.values = pairs.values + torch.tensor(values, dtype=torch.float32, device=logits.device)


def _forbid(logits: torch.Tensor, token_ids: list[Collection[int]]) -> None:
    if any(token_ids):
        pairs = _Pairs(logits, token_ids)
        logits[pairs.rows, pairs.ids] = -torch.inf


def completing_bad_words(sequence: Sequence) -> list[int]:
    """Tokens that would complete a bad word whose beginning the output ends in."""
    output = sequence.output_token_ids
    found = []
    for *beginning, last in sequence.request.bad_word_token_ids:
        num_needed = len(beginning)
        if num_needed <= len(output) and output[len(output) - num_needed :] == beginning:
            found.append(last)
    return found


def barred_stops(sequence: Sequence) -> Collection[int]:
    return sequence.request.stop_token_ids if sequence.num_output_tokens < sequence.params.min_tokens else ()


def _guide(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    for row, sequence in zip(logits, sequences, strict=True):
        if sequence.matcher is not None:
            allowed = torch.from_numpy(sequence.matcher.allowed_after(sequence.output_token_ids))[: len(row)]
            row[: len(allowed)].masked_fill_(~allowed.to(row.device), -torch.inf)
            row[len(allowed) :] = -torch.inf


def _penalize_repetition(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    factors = [sequence.params.repetition_penalty for sequence in sequences]
    if all(factor == 1.0 for factor in factors):
        return
    seen: list[Collection[int]] = [
        () if factor == 1.0 else {*sequence.prompt_token_ids, *sequence.output_token_ids}
        for factor, sequence in zip(factors, sequences, strict=True)
    ]
    pairs = _Pairs(logits, seen)
    values, factor = pairs.values, pairs.of_rows(factors)
    pairs.values = torch.where(values > 0, values / factor, values * factor)


def _penalize_output(logits: torch.Tensor, sequences: list[Sequence]) -> None:
    frequencies = [sequence.params.frequency_penalty for sequence in sequences]
    presences = [sequence.params.presence_penalty for sequence in sequences]
    counts = [
        Counter(sequence.output_token_ids if frequency or presence else ())
        for sequence, frequency, presence in zip(sequences, frequencies, presences, strict=True)
    ]
    if not any(counts):
        return
    pairs = _Pairs(logits, list(counts))
    times = torch.tensor([count for each in counts for count in each.values()], device=logits.device)
    pairs.values = pairs.values - (pairs.of_rows(frequencies) * times + pairs.of_rows(presences))
