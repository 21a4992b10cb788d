"""What the sampling kernels need to know about a step's draws, as arrays. Pure.

The processors of `engine.processors`, in their order, become edits of single tokens: a bias, -inf for what bad words
or min_tokens forbid, and the counts that the penalties go by.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.processors import barred_stops, completing_bad_words, needs_processing
from engine.sampler import Draw
from engine.sequence import Sequence

_SEED_BITS = 64
_WORD_BITS = 32


@dataclass(slots=True)
class _Edit:
    bias: float = 0.0
    is_seen: bool = False  # in the prompt or the output
    count: int = 0  # in the output


@dataclass(slots=True)
class _Edits:
    by_token: dict[int, _Edit] = field(default_factory=dict)

    def of(self, token_id: int) -> _Edit:
        return self.by_token.setdefault(token_id, _Edit())


def draw_arrays(draws: list[Draw]) -> dict[str, npt.NDArray[Any]]:
    """The fields of `kernels.sampling.draws.Draws`, by name."""
    params = [draw.sequence.params for draw in draws]
    signed = [_signed(draw.sequence.seed) for draw in draws]
    return {
        "places": np.array([draw.place for draw in draws], dtype=np.int64),
        "seeds": np.array(signed, dtype=np.int64),
        "temperatures": np.array([each.temperature for each in params], dtype=np.float32),
        "choices": np.array([draw.sequence.choice for draw in draws], dtype=np.int32),
        "output_indices": np.array([draw.output_index for draw in draws], dtype=np.int32),
        "repetition_penalties": np.array([each.repetition_penalty for each in params], dtype=np.float32),
        "frequency_penalties": np.array([each.frequency_penalty for each in params], dtype=np.float32),
        "presence_penalties": np.array([each.presence_penalty for each in params], dtype=np.float32),
    }


def edit_arrays(draws: list[Draw]) -> dict[str, npt.NDArray[Any]] | None:
    """The fields of `kernels.sampling.draws.TokenEdits`; None where no draw is edited."""
    if not any(needs_processing(draw.sequence) for draw in draws):
        return None
    edits = [_edits_of(draw.sequence) for draw in draws]
    flat = [edit for each in edits for edit in each.by_token.values()]
    return {
        "starts": np.cumsum([0, *(len(each.by_token) for each in edits)], dtype=np.int64),
        "token_ids": np.array([token_id for each in edits for token_id in each.by_token], dtype=np.int64),
        "biases": np.array([edit.bias for edit in flat], dtype=np.float32),
        "output_counts": np.array([edit.count for edit in flat], dtype=np.int32),
        "is_seen": np.array([edit.is_seen for edit in flat], dtype=np.bool_),
    }


def mask_array(draws: list[Draw], vocab_size: int) -> npt.NDArray[np.int32] | None:
    """Bit (id % 32) of word (id // 32) of a draw's row says whether its grammar allows the token: [draws, words]; None
    where no draw follows a grammar.
    """
    if all(draw.sequence.matcher is None for draw in draws):
        return None
    may_be_drawn = np.ones((len(draws), -(-vocab_size // _WORD_BITS) * _WORD_BITS), dtype=bool)
    for row, draw in zip(may_be_drawn, draws, strict=True):
        matcher = draw.sequence.matcher
        if matcher is not None:
            allowed = matcher.allowed_after(draw.sequence.output_token_ids)[:vocab_size]
            row[: len(allowed)] = allowed
            row[len(allowed) :] = False
    return np.packbits(may_be_drawn, axis=1, bitorder="little").view(np.int32)


def _edits_of(sequence: Sequence) -> _Edits:
    params, edits = sequence.params, _Edits()
    for token_id, bias in (params.logit_bias or {}).items():
        edits.of(token_id).bias = bias
    for token_id in (*completing_bad_words(sequence), *barred_stops(sequence)):
        edits.of(token_id).bias = -math.inf
    if params.repetition_penalty != 1.0:
        for token_id in {*sequence.prompt_token_ids, *sequence.output_token_ids}:
            edits.of(token_id).is_seen = True
    if params.frequency_penalty or params.presence_penalty:
        for token_id, count in Counter(sequence.output_token_ids).items():
            edits.of(token_id).count = count
    return edits


def _signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    return seed - (1 << _SEED_BITS) if seed >> (_SEED_BITS - 1) else seed
