"""The randomness of sampling: a pure function of (seed, choice, output index, token id), the same on every machine.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a counter and a key into
four 32-bit words without any state. A sequence can therefore stop, move and go on with the noise it would have had.

    key      = seed, low word and high word
    counter  = (token id / 4, output index, choice, use); the token takes word (token id % 4); draws are use 0

A word w becomes v in (0, 1) and then Gumbel noise g = -log(-log(1 - v)), whose large values are the fine-grained ones:
argmax over tokens of logit + T * g is a draw from softmax(logit / T). The smaller the word, the larger the noise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Key = tuple[int, int] | tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]  # low and high word, one or many

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_LOW = np.uint64(_MASK)
_HIGH_SHIFT = np.uint64(32)
_LARGEST = np.float32(1 - 2**-24)  # the last fp32 below 1


class DrawKey(NamedTuple):
    """What the noise of one draw depends on, the token aside. `seed` counts modulo 2^64."""

    seed: int
    choice: int
    output_index: int
    use: int = 0  # other randomness at the same place


def philox(counter: tuple[Words, Words, Words, Words], key: Key) -> tuple[Words, Words, Words, Words]:
    """Four words for each counter; the counter's parts and the key's broadcast against each other."""
    x0, x1, x2, x3 = (part.astype(np.uint64) for part in counter)
    low, high = (np.asarray(part, dtype=np.uint64) for part in key)
    for _ in range(_NUM_ROUNDS):
        left, right = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (right >> _HIGH_SHIFT) ^ x1 ^ low,
            right & _LOW,
            (left >> _HIGH_SHIFT) ^ x3 ^ high,
            left & _LOW,
        )
        low, high = (low + _KEY_STEPS[0]) & _LOW, (high + _KEY_STEPS[1]) & _LOW
    return x0.astype(np.uint32), x1.astype(np.uint32), x2.astype(np.uint32), x3.astype(np.uint32)


def noise_words(key: DrawKey, num_tokens: int) -> Words:
    """The words of token ids 0 .. num_tokens - 1: [num_tokens].

    `philox` without its temporaries, so that all of a row's numbers stay in the cache; and its first round is spared
    where all groups of four tokens have it in common.
    """
    low_product, high_product = _first_products((num_tokens + 3) // 4)
    low, high = key.seed & _MASK, (key.seed >> 32) & _MASK
    right = key.choice * int(_MULTIPLIERS[1])
    x0 = np.full_like(low_product, (right >> 32) ^ key.output_index ^ low)
    x1 = np.full_like(low_product, right & _MASK)
    x2 = high_product ^ np.uint64(high ^ key.use)
    x3 = low_product.copy()
    lefts, rights = np.empty_like(x0), np.empty_like(x0)
    for _ in range(_NUM_ROUNDS - 1):
        low, high = (low + int(_KEY_STEPS[0])) & _MASK, (high + int(_KEY_STEPS[1])) & _MASK
        np.multiply(x0, _MULTIPLIERS[0], out=lefts)
        np.multiply(x2, _MULTIPLIERS[1], out=rights)
        for x, other, product, step in ((x0, x1, rights, low), (x2, x3, lefts, high)):
            np.right_shift(product, _HIGH_SHIFT, out=x)
            np.bitwise_xor(x, other, out=x)
            np.bitwise_xor(x, np.uint64(step), out=x)
            np.bitwise_and(product, _LOW, out=other)
    words = np.empty((len(x0), 4), dtype=np.uint32)
    for place, x in enumerate((x0, x1, x2, x3)):
        words[:, place] = x
    return words.reshape(-1)[:num_tokens]


@lru_cache(maxsize=4)  # one for each size of vocabulary
def _first_products(num_groups: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Low and high words of group * multiplier."""
    products = np.arange(num_groups, dtype=np.uint64) * _MULTIPLIERS[0]
    return products & _LOW, products >> _HIGH_SHIFT


def words_at(keys: list[DrawKey], draws: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> Words:
    """For each i the word of token token_ids[i] under keys[draws[i]]: [len(token_ids)]."""
    low, high, index, choice, use = (
        np.array(
            [(key.seed & _MASK, (key.seed >> 32) & _MASK, key.output_index, key.choice, key.use) for key in keys],
            dtype=np.uint64,
        )
        .reshape(-1, 5)[draws]
        .T
    )
    index, choice, use = (each.astype(np.uint32) for each in (index, choice, use))
    counter = ((token_ids // 4).astype(np.uint32), index, choice, use)
    words = np.stack(philox(counter, (low, high)))
    return words[token_ids % 4, np.arange(len(token_ids))]


def gumbel_noise(seed: int, choice: int, output_index: int, num_tokens: int) -> npt.NDArray[np.float32]:
    """Noise for token ids 0 .. num_tokens - 1: [num_tokens]."""
    return gumbel(noise_words(DrawKey(seed, choice, output_index), num_tokens))


def gumbel_noise_of(
    seed: int, choice: int, output_index: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The same noise for these token ids alone."""
    return gumbel(words_at([DrawKey(seed, choice, output_index)], np.zeros_like(token_ids), token_ids))


def gumbel(words: Words) -> npt.NDArray[np.float32]:
    """Every step up to v is exact or correctly rounded in fp32, so v has the same bits everywhere; the logarithms are
    taken in fp64 and rounded once.
    """
    v = np.minimum(words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33), _LARGEST).astype(np.float64)
    noise: npt.NDArray[np.float64] = -np.log(-np.log1p(-v))
    return noise.astype(np.float32)
