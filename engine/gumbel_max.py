"""The draw without filters: argmax over the whole vocabulary of logit + T * g, with few logarithms.

Noise -log(E), E = -log(1 - v), of a token with word w and v = (w + 1/2) / 2^32: for the token to beat a score S that
some token has already, E must be at most t = exp((logit - S) / T), and v < E. So whoever has w > t * 2^32 is out, and
the exact score is computed for the rest alone: a handful of tokens, whatever the vocabulary. Each row is handled by
itself and stays in the cache. The rest is found by the native library where the process has loaded it, else by numpy;
either finds whoever could win, so the draw is the same.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.noise import DrawKey, Words, gumbel, noise_words, words_at
from kernels.cpu import library

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
    native = library.loaded()
    find = _rivals if native is None else native.rivals
    ids, words, counts = find(logits, key_words(keys), to_beat, np.reciprocal(scales))
    rows = np.repeat(places, counts)
    return _best_of_each(ids, _scores(logits[rows, ids], words, scales[rows]), counts)


def _rivals(
    logits: Floats, keys: Words, scores: Floats, inverse_scales: Floats
) -> tuple[npt.NDArray[np.int32], Words, npt.NDArray[np.int32]]:
    """`Library.rivals` in numpy."""
    found_ids, found_words = [], []
    bounds = np.empty_like(logits[0])
    for row, (low, high, index, choice), score, scale in zip(
        logits, keys.tolist(), scores, inverse_scales, strict=True
    ):
        words = noise_words(DrawKey(high << 32 | low, choice, index), len(row))
        np.subtract(row, score, out=bounds)
        np.multiply(bounds, scale, out=bounds)
        with np.errstate(over="ignore"):  # infinity bounds nothing, which is right
            np.exp(bounds, out=bounds)
        ids = np.flatnonzero(words.astype(np.float32) <= bounds)
        found_ids.append(ids.astype(np.int32))
        found_words.append(words[ids])
    counts = np.array([len(ids) for ids in found_ids], dtype=np.int32)
    return np.concatenate(found_ids), np.concatenate(found_words), counts


def draw_from_some(
    logits: Floats, supports: list[npt.NDArray[np.int64]], keys: list[DrawKey], temperatures: list[float]
) -> list[int]:
    """The same where only supports[row], ascending and at least one, may be drawn."""
    counts = np.array([len(ids) for ids in supports])
    rows, ids = np.repeat(np.arange(len(keys)), counts), np.concatenate(supports)
    scores = _scores(logits[rows, ids], words_at(keys, rows, ids), np.array(temperatures, dtype=np.float32)[rows])
    return _best_of_each(ids, scores, counts)


def _best_of_each(ids: npt.NDArray[Any], scores: Floats, counts: npt.NDArray[Any]) -> list[int]:
    """The id of the largest score, the first of equals, in each run of `counts`."""
    ends = np.cumsum(counts)
    return [int(ids[start + scores[start:end].argmax()]) for start, end in zip(ends - counts, ends, strict=True)]


def key_words(keys: list[DrawKey]) -> Words:
    """[n, 4]: low and high word of the seed, output index, choice."""
    low_word = 0xFFFFFFFF
    rows = [(key.seed & low_word, key.seed >> 32 & low_word, key.output_index, key.choice) for key in keys]
    return np.array(rows, dtype=np.uint32).reshape(-1, 4)


def _scores(values: Floats, words: Words, scales: Floats | np.float32) -> Floats:
    return values + scales * gumbel(words)
