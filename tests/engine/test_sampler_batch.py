"""Draws made together are, bit for bit, those of each row alone: tokens and logprobs, whatever the company."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.gumbel_max import draw_from_all
from engine.logprobs import position_logprobs
from engine.noise import DrawKey, gumbel_noise
from engine.plan import Sampled
from engine.rows import largest, ranks, top
from engine.sampler import Draw, sample
from engine.sequence import Sequence
from tests.engine.test_sampler import SETTINGS, random_logits, sequence_of


def settings_of(rng: random.Random, logprobs: bool) -> dict[str, Any]:
    chosen = dict(rng.choice(SETTINGS))
    if logprobs and rng.random() < 0.6:
        chosen["logprobs"] = rng.choice([0, 1, 5, 20])
    return chosen


@pytest.mark.parametrize("vocab", [700, 5003, 49_152])
def test_a_batch_draws_what_each_row_draws_alone(vocab: int) -> None:
    rng = random.Random(vocab)
    logits = torch.stack([random_logits(i, vocab=vocab) for i in range(64)])
    sequences = [
        sequence_of(
            [rng.randrange(600) for _ in range(rng.randrange(9))], seed=i, choice=i % 3, **settings_of(rng, True)
        )
        for i in range(64)
    ]
    alone = [sample(logits[i : i + 1], [Draw(0, sequence)])[0] for i, sequence in enumerate(sequences)]
    assert len({answer.token_id for answer in alone}) > 10
    for size in (2, 3, 17, 64):
        start = rng.randrange(65 - size)
        assert together(logits, sequences, list(range(start, start + size))) == alone[start : start + size]
    shuffled = rng.sample(range(64), 40)
    assert together(logits, sequences, shuffled) == [alone[i] for i in shuffled]


def together(logits: torch.Tensor, sequences: list[Sequence], rows: list[int]) -> list[Sampled]:
    return sample(logits[rows], [Draw(place, sequences[row]) for place, row in enumerate(rows)])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_logprobs_keep_their_bits_in_any_batch_and_on_any_number_of_threads(threads: int) -> None:
    vocab, before = 49_152, torch.get_num_threads()
    logits = torch.stack([random_logits(i, vocab=vocab) for i in range(64)])
    chosen = [i * 700 for i in range(64)]
    alone = [position_logprobs(logits[i : i + 1], chosen[i : i + 1], 5)[0] for i in range(64)]
    padded = torch.empty(64, vocab + 32)[:, :vocab].copy_(logits)
    try:
        torch.set_num_threads(threads)
        for size in range(1, 65, 7):
            assert position_logprobs(logits[:size], chosen[:size], 5) == alone[:size]
            assert position_logprobs(padded[:size], chosen[:size], 5) == alone[:size]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0, 40.0])
def test_the_search_for_the_largest_noised_logit_misses_none(temperature: float, spread: float) -> None:
    """Against the noise of every token, over logits from flat to steep, small to large, with ruled-out ones."""
    for seed in range(12):
        row = random_logits(seed, spread=spread, vocab=3001) + 50.0 * (seed % 3 - 1)
        row[seed::5] = -torch.inf
        key = DrawKey(seed * 7919, seed % 4, seed)
        scores = row.numpy() + np.float32(temperature) * gumbel_noise(*key[:3], 3001)
        ids = np.array(largest(row[None])[1])
        assert draw_from_all(row[None].numpy(), ids, [key], [temperature]) == [int(scores.argmax())]


@pytest.mark.parametrize("vocab", [5, 17, 333, 4096])
@pytest.mark.parametrize("num_values", [2, 7, 10_000])
def test_tops_and_ranks_are_those_of_a_stable_sort(vocab: int, num_values: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(num_values, (20, vocab), generator=generator).float()
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for count in (0, 1, 3, 5):
        assert torch.equal(top(logits, count), order[:, :count])
    for place in range(0, vocab, max(1, vocab // 9)):
        assert ranks(logits, order[:, place : place + 1]).tolist() == [place + 1] * 20
