"""Sampling's noise in the native library: the words of engine/noise.py, and the draws that numpy makes."""

from __future__ import annotations

import numpy as np
import pytest

from engine import gumbel_max
from engine.noise import DrawKey, noise_words
from kernels.cpu import library
from kernels.cpu.build import BuildUnavailable, usable_variants
from kernels.cpu.library import Library
from tests.conftest import skip_or_fail

KEYS = [DrawKey(0, 0, 0), DrawKey(2**64 - 1, 3, 2**31), DrawKey(0x123456789ABCDEF, 7, 41), DrawKey(5, 2**20, 1)]


@pytest.fixture(scope="session")
def libraries() -> list[Library]:
    try:
        return [Library(variant) for variant in usable_variants()]
    except BuildUnavailable as error:
        skip_or_fail(str(error))
        raise


def logits_of(vocab: int) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (len(KEYS), vocab)).astype(np.float32)
    logits[0, vocab // 2] = 25.0  # a clear favourite
    logits[1, :] = 0.0  # all alike
    logits[2, 1::2] = -np.inf
    return logits


@pytest.mark.parametrize("vocab", [1, 3, 31, 32, 33, 320, 4999])
def test_words_are_those_of_the_definition(libraries: list[Library], vocab: int) -> None:
    everyone = np.full(len(KEYS), -np.inf, dtype=np.float32)  # a score that each token may beat
    for lib in libraries:
        ids, words, counts = lib.rivals(
            np.zeros((len(KEYS), vocab), np.float32), gumbel_max.key_words(KEYS), everyone, np.ones_like(everyone)
        )
        assert counts.tolist() == [vocab] * len(KEYS), lib.variant.name
        assert ids.tolist() == list(range(vocab)) * len(KEYS)
        assert words.tolist() == [word for key in KEYS for word in noise_words(key, vocab).tolist()]


@pytest.mark.parametrize("vocab", [320, 4999])
@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 40.0])
def test_draws_are_those_of_numpy(
    libraries: list[Library], vocab: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(vocab)
    best, temperatures = logits.argmax(axis=1), [temperature] * len(KEYS)
    for index in range(20):
        keys = [DrawKey(key.seed, key.choice, key.output_index + index) for key in KEYS]
        monkeypatch.setattr(library, "loaded", lambda: None)
        expected = gumbel_max.draw_from_all(logits, best, keys, temperatures)
        for lib in libraries:
            monkeypatch.setattr(library, "loaded", lambda lib=lib: lib)
            assert gumbel_max.draw_from_all(logits, best, keys, temperatures) == expected, lib.variant.name


def test_few_tokens_are_left_to_score(libraries: list[Library]) -> None:
    """Which is what the search is for: over a vocabulary of 4,999 alike, those with the smallest words alone."""
    vocab = 4999
    keys = gumbel_max.key_words(KEYS)
    scores = np.full(len(KEYS), -15.0, dtype=np.float32)
    for lib in libraries:
        ids, words, _ = lib.rivals(np.zeros((len(KEYS), vocab), np.float32), keys, scores, np.ones_like(scores))
        assert (words <= np.exp(15.0) * 1.001).all()
        assert 0 < len(ids) < 100
