"""The noise is Philox, the same for a token however it is asked for, and Gumbel."""

from __future__ import annotations

import numpy as np
import pytest

from engine.noise import DrawKey, gumbel, gumbel_noise, gumbel_noise_of, noise_words, philox, words_at

# Known answers of philox4x32-10, published with the Random123 library (kat_vectors): counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    parts = tuple(np.array([word], dtype=np.uint32) for word in words(counter))
    low, high = words(key)
    assert [int(word[0]) for word in philox(parts, (low, high))] == words(result)  # type: ignore[arg-type]


def test_each_part_of_the_key_changes_the_noise() -> None:
    base = gumbel_noise(1, 0, 0, 64)
    for other in (
        gumbel_noise(2, 0, 0, 64),
        gumbel_noise(1 + 2**32, 0, 0, 64),
        gumbel_noise(1, 1, 0, 64),
        gumbel_noise(1, 0, 1, 64),
    ):
        assert not np.any(base == other)


def test_seeds_count_modulo_two_to_the_64th() -> None:
    assert np.array_equal(gumbel_noise(-1, 0, 0, 8), gumbel_noise(2**64 - 1, 0, 0, 8))


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 257])
def test_a_token_has_its_noise_whoever_else_is_asked_for(num_tokens: int) -> None:
    whole = gumbel_noise(7, 3, 11, num_tokens)
    assert whole.shape == (num_tokens,)
    ids = np.random.default_rng(0).permutation(num_tokens)
    assert np.array_equal(gumbel_noise_of(7, 3, 11, ids), whole[ids])
    assert np.array_equal(gumbel_noise(7, 3, 11, 1000)[:num_tokens], whole)


def test_far_and_near_tokens_have_the_same_noise() -> None:
    whole = gumbel_noise(7, 3, 11, 50_000)
    rng = np.random.default_rng(0)
    for ids in (
        np.array([49_999]),
        np.array([3, 49_000]),
        np.arange(20_001, 20_103),
        np.sort(rng.choice(50_000, 20_000, replace=False)),
    ):
        assert np.array_equal(gumbel_noise_of(7, 3, 11, ids), whole[ids])


def test_noise_is_finite_at_both_ends_of_the_words() -> None:
    extremes = gumbel(np.array([0, 1, 2**32 - 1], dtype=np.uint32))
    assert np.all(np.isfinite(extremes))
    assert extremes[0] == pytest.approx(22.874, abs=1e-3)
    assert extremes.min() > -2.82


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = np.concatenate([gumbel_noise(seed, 0, 0, 50_000) for seed in range(4)]).astype(np.float64)
    assert noise.mean() == pytest.approx(0.57722, abs=0.02)  # Euler's constant
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.04)
    for quantile in (0.01, 0.25, 0.5, 0.75, 0.99, 0.9999):
        expected = -np.log(-np.log(quantile))
        assert np.mean(noise <= expected) == pytest.approx(quantile, abs=0.005)


def test_words_of_many_draws_at_once_are_those_of_each() -> None:
    keys = [DrawKey(5, 0, 0), DrawKey(2**63 + 11, 7, 900), DrawKey(-3, 1, 2**20)]
    draws = np.random.default_rng(0).integers(3, size=500)
    ids = np.random.default_rng(1).integers(50_000, size=500)
    rows = [noise_words(key, 50_000) for key in keys]
    assert words_at(keys, draws, ids).tolist() == [
        rows[draw][token_id] for draw, token_id in zip(draws, ids, strict=True)
    ]


@pytest.mark.parametrize("key", [DrawKey(0, 0, 0), DrawKey(2**64 - 1, 127, 2**31), DrawKey(77, 3, 12)])
def test_words_of_a_row_are_philox_of_its_counters(key: DrawKey) -> None:
    groups = np.arange(25, dtype=np.uint32)
    index, choice, zero = (np.array([part], dtype=np.uint32) for part in (key.output_index, key.choice, 0))
    expected = philox((groups, index, choice, zero), (key.seed & 0xFFFFFFFF, key.seed >> 32))
    assert noise_words(key, 98).tolist() == np.stack(expected, axis=1).reshape(-1)[:98].tolist()
