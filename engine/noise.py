"""The randomness of sampling: a pure function of (seed, choice, output index, token id), the same on every machine.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter and a key into
four 32-bit words without any state. A sequence can therefore stop, move and go on with the noise it would have had.

    key      = seed, low word and high word
    counter  = (token id / 4, output index, choice, 0); the token takes word (token id % 4)

A word w becomes v in (0, 1) and then Gumbel noise g = -log(-log(1 - v)), whose large values are the fine-grained ones:
argmax over tokens of logit + T * g is a draw from softmax(logit / T).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HIGH_SHIFT = np.uint64(32)
_LARGEST = np.float32(1 - 2**-24)  # the last fp32 below 1


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Four words for each counter; the counter's parts broadcast against each other."""
    x0, x1, x2, x3 = (part.astype(np.uint64) for part in counter)
    low, high = key
    for _ in range(_NUM_ROUNDS):
        left, right = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (right >> _HIGH_SHIFT) ^ x1 ^ np.uint64(low),
            right & _LOW,
            (left >> _HIGH_SHIFT) ^ x3 ^ np.uint64(high),
            left & _LOW,
        )
        low, high = (low + _KEY_STEPS[0]) & 0xFFFFFFFF, (high + _KEY_STEPS[1]) & 0xFFFFFFFF
    return x0.astype(np.uint32), x1.astype(np.uint32), x2.astype(np.uint32), x3.astype(np.uint32)


def gumbel_noise(seed: int, choice: int, output_index: int, num_tokens: int) -> npt.NDArray[np.float32]:
    """Noise for token ids 0 .. num_tokens - 1: [num_tokens]. `seed` counts modulo 2^64."""
    words = _words(seed, choice, output_index, np.arange((num_tokens + 3) // 4, dtype=np.uint32))
    return _gumbel(np.stack(words, axis=1).reshape(-1)[:num_tokens])


def gumbel_noise_of(
    seed: int, choice: int, output_index: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The same noise for these token ids alone; at least one."""
    groups = token_ids // 4
    places = np.arange(len(groups))
    first, last = int(groups.min()), int(groups.max())
    if last - first < len(groups):  # close together: each group once, not once for each of its tokens
        groups, places = np.arange(first, last + 1), groups - first
    words = np.stack(_words(seed, choice, output_index, groups.astype(np.uint32)))
    return _gumbel(words[token_ids % 4, places])


def _words(seed: int, choice: int, output_index: int, groups: Words) -> tuple[Words, Words, Words, Words]:
    index, branch, zero = (np.array([value], dtype=np.uint32) for value in (output_index, choice, 0))
    return philox((groups, index, branch, zero), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))


def _gumbel(words: Words) -> npt.NDArray[np.float32]:
    """Every step up to v is exact or correctly rounded in fp32, so v has the same bits everywhere; the logarithms are
    taken in fp64 and rounded once.
    """
    v = np.minimum(words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33), _LARGEST).astype(np.float64)
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-v))
    return noise.astype(np.float32)
