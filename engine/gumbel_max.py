"""The draw without filters: argmax over the whole vocabulary of logit + T * g, with few logarithms.

Noise -log(E), E = -log(1 - v), of a token with word w and v = (w + 1/2) / 2^32: for the token to beat a score S that
some token has already, E must be at most t = exp((logit - S) / T), and v < E. So whoever has w > t * 2^32 is out, and
the exact score is computed for the rest alone: a handful of tokens, whatever the vocabulary. Each row is handled by
itself and stays in the cache.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from engine.noise import DrawKey, Words, gumbel, noise_words, words_at

Floats = npt.NDArray[np.float32]

_SCORE_SLACK = 1e-6  # of a score's size: more than fp32 rounds it by
_LOG_OF_WORDS = 32 * math.log(2) + 1e-3  # the bound is t * 2^32, and a thousandth more for what fp32 rounds
_LARGEST_NOISE = 23.0


def draw_from_all(
    logits: Floats, best_ids: npt.NDArray[np.int64], keys: list[DrawKey], temperatures: list[float]
) -> list[int]:
    """One token id for each row of logits [n, vocab], of which at least one is finite; the lowest of equals.

    best_ids: [n], of each row's largest logit, whose noised score is the one to beat.
    """
    places, scales = np.arange(len(keys)), np.array(temperatures, dtype=np.float32)
    to_beat = _scores(logits[places, best_ids], words_at(keys, places, best_ids), scales)
    to_beat -= _SCORE_SLACK * (np.abs(to_beat) + _LARGEST_NOISE * scales) + scales * np.float32(_LOG_OF_WORDS)
    drawn: list[int] = []
    bounds = np.empty_like(logits[0])
    for row, score, key, scale in zip(logits, to_beat, keys, scales, strict=True):
        words = noise_words(key, len(row))
        np.subtract(row, score, out=bounds)
        np.multiply(bounds, 1 / scale, out=bounds)
        with np.errstate(over="ignore"):  # infinity bounds nothing, which is right
            np.exp(bounds, out=bounds)
        rivals = np.flatnonzero(words.astype(np.float32) <= bounds)
        drawn.append(int(rivals[_scores(row[rivals], words[rivals], scale).argmax()]))
    return drawn


def draw_from_some(
    logits: Floats, supports: list[npt.NDArray[np.int64]], keys: list[DrawKey], temperatures: list[float]
) -> list[int]:
    """The same where only supports[row], ascending and at least one, may be drawn."""
    lens = [len(ids) for ids in supports]
    rows, ids = np.repeat(np.arange(len(keys)), lens), np.concatenate(supports)
    scores = _scores(logits[rows, ids], words_at(keys, rows, ids), np.array(temperatures, dtype=np.float32)[rows])
    ends = np.cumsum(lens)
    return [int(ids[start + scores[start:end].argmax()]) for start, end in zip(ends - lens, ends, strict=True)]


def _scores(values: Floats, words: Words, scales: Floats | np.float32) -> Floats:
    return values + scales * gumbel(words)
