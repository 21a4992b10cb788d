"""Each parameter against a slow and plain reading of its definition, in Python floats over sorted lists."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from engine.noise import gumbel_noise
from engine.params import SamplingParams
from engine.plan import Sampled
from engine.sampler import Draw, sample
from engine.sequence import Sequence
from tests.engine.runner_aids import new_sequence

VOCAB = 700  # over the filters' first guess of 512, so that both of their ways are walked
PROMPT = [5, 9, 9, 300]


def random_logits(seed: int, spread: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sequence_of(output: list[int] | None = None, seed: int = 0, choice: int = 0, **fields: Any) -> Sequence:
    request = {name: fields.pop(name) for name in ("bad_word_token_ids", "stop_token_ids") if name in fields}
    made = new_sequence(PROMPT, SamplingParams(**{"temperature": 1.0, **fields}), seed, **request)
    made.choice = choice
    made.output_token_ids = list(output or [])
    return made


def draw(logits: torch.Tensor, sequence: Sequence) -> Sampled:
    return sample(logits[None], [Draw(0, sequence)])[0]


# The plain reading.


def plain_logits(logits: torch.Tensor, sequence: Sequence) -> list[float]:
    params, output = sequence.params, sequence.output_token_ids
    row = logits.tolist()
    for token_id, bias in (params.logit_bias or {}).items():
        row[token_id] += bias
    for bad in sequence.request.bad_word_token_ids:
        if [*output, None][-len(bad) : -1] == bad[:-1]:
            row[bad[-1]] = -math.inf
    for token_id in range(len(row)):
        if token_id in PROMPT or token_id in output:
            if row[token_id] > 0:
                row[token_id] /= params.repetition_penalty
            else:
                row[token_id] *= params.repetition_penalty
        row[token_id] -= params.frequency_penalty * output.count(token_id)
        row[token_id] -= params.presence_penalty * (token_id in output)
    if len(output) < params.min_tokens:
        for token_id in sequence.request.stop_token_ids:
            row[token_id] = -math.inf
    return row


def plain_support(row: list[float], params: SamplingParams) -> list[int]:
    ranked = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    largest = row[ranked[0]]
    weights = [math.exp((row[i] - largest) / params.temperature) for i in ranked]
    total, before, kept = sum(weights), 0.0, []
    for token_id, weight in zip(ranked, weights, strict=True):
        if before / total < params.top_p and weight >= params.min_p:
            kept.append(token_id)
        before += weight
    return sorted(kept)


def plain_token(logits: torch.Tensor, sequence: Sequence) -> int:
    params = sequence.params
    row = plain_logits(logits, sequence)
    if params.temperature == 0:
        return max(range(len(row)), key=lambda i: (row[i], -i))
    noise = gumbel_noise(sequence.seed, sequence.choice, sequence.num_output_tokens, len(row))
    return max(
        plain_support(row, params),
        key=lambda i: (float(np.float32(row[i]) + np.float32(params.temperature) * noise[i]), -i),
    )


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 600},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 4.0},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.05, "temperature": 0.8},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "temperature": 0.0},
    {"frequency_penalty": 1.5},
    {"presence_penalty": -2.0},
    {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    {"logit_bias": {0: 100.0, 3: -100.0}},
    {"logit_bias": {699: 4.0, 5: -3.0}, "repetition_penalty": 1.3},
    {"bad_word_token_ids": [[9], [7, 8], [400, 401, 402]]},
    {"min_tokens": 10, "stop_token_ids": frozenset({2, 50, 600})},
    {"min_tokens": 2, "stop_token_ids": frozenset({2, 50, 600})},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_draws_are_those_of_the_plain_reading(settings: dict[str, Any]) -> None:
    rng = random.Random(0)
    for trial in range(25):
        logits = random_logits(trial)
        output = [rng.choice([5, 9, 7, 400, 401, rng.randrange(VOCAB)]) for _ in range(rng.randrange(6))]
        if trial % 3 == 0:
            output += [400, 401]  # the beginning of a bad word
        sequence = sequence_of(output, seed=trial * 7919, choice=trial % 3, **settings)
        before = logits.clone()
        assert draw(logits, sequence).token_id == plain_token(logits, sequence)
        assert torch.equal(logits, before), "the caller's logits were changed"


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = random_logits(0)
    top = logits.argsort(descending=True).tolist()
    for seed in range(30):
        sequence = sequence_of([400], seed, bad_word_token_ids=[[400, top[0]], [top[1]], [401, top[2]]], top_k=3)
        assert draw(logits, sequence).token_id in top[2:5]


def test_stop_tokens_are_barred_for_exactly_min_tokens() -> None:
    logits = random_logits(0)
    logits[50] = 99.0
    for num_output in range(5):
        settings = {"min_tokens": 2, "stop_token_ids": frozenset({50}), "presence_penalty": 0.1, "temperature": 0.0}
        drawn = draw(logits, sequence_of([1] * num_output, **settings)).token_id
        assert (drawn == 50) is (num_output >= 2)


def test_greedy_ties_take_the_lower_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[[650, 31, 644]] = 2.0
    assert draw(logits, sequence_of(temperature=0.0)).token_id == 31
    assert draw(logits, sequence_of(temperature=0.0, logit_bias={31: -1.0})).token_id == 644


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.45}, {"top_k": 3, "top_p": 0.6}])
def test_filters_rank_equal_logits_by_id(settings: dict[str, Any]) -> None:
    logits = torch.full((VOCAB,), -30.0)
    logits[[10, 20, 600, 690]] = 1.0
    drawn = {draw(logits, sequence_of(seed=seed, **settings)).token_id for seed in range(60)}
    assert drawn == {10, 20}


def test_top_k_over_the_vocabulary_filters_nothing() -> None:
    logits = random_logits(3)
    for seed in range(20):
        assert draw(logits, sequence_of(seed=seed, top_k=VOCAB + 5)) == draw(logits, sequence_of(seed=seed))


def test_draws_follow_the_softmax() -> None:
    """20,000 draws over 12 tokens: chi-square with 11 degrees of freedom stays under its 1 - 1e-4 quantile."""
    logits = random_logits(1, spread=1.5, vocab=12)
    counts = np.zeros(12)
    for start in range(0, 20_000, 1000):
        sequences = [sequence_of(seed=seed, temperature=0.7) for seed in range(start, start + 1000)]
        for sampled in sample(logits[None], [Draw(0, sequence) for sequence in sequences]):
            assert sampled.token_id is not None
            counts[sampled.token_id] += 1
    expected = (logits.double() / 0.7).softmax(-1).numpy() * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 37.4


def test_a_draw_depends_on_its_own_row_alone() -> None:
    logits = torch.stack([random_logits(i) for i in range(6)])
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"repetition_penalty": 1.5},
    ]
    sequences = [sequence_of([1, 2], seed=i, **fields) for i, fields in enumerate(settings)]
    alone = [draw(logits[i], sequence) for i, sequence in enumerate(sequences)]
    together = sample(logits, [Draw(i, sequence) for i, sequence in enumerate(sequences)])
    backwards = sample(logits, [Draw(i, sequence) for i, sequence in reversed(list(enumerate(sequences)))])
    assert together == alone
    assert backwards[::-1] == alone


def test_choices_of_one_row_draw_apart_and_each_as_alone() -> None:
    logits = torch.stack([random_logits(0), random_logits(1)])
    choices = [sequence_of(seed=4, choice=i) for i in range(8)]
    together = sample(logits, [Draw(1, sequence) for sequence in choices])
    assert together == [draw(logits[1], sequence) for sequence in choices]
    assert len({sampled.token_id for sampled in together}) > 1


def test_no_draws_no_answers() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 4}, {"presence_penalty": 1.0}])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_logit_fails_its_own_draw_alone(settings: dict[str, Any], broken: float) -> None:
    logits = torch.stack([random_logits(i) for i in range(3)])
    logits[1, 333] = broken
    sequences = [sequence_of(seed=i, **settings) for i in range(3)]
    answers = sample(logits, [Draw(i, sequence) for i, sequence in enumerate(sequences)])
    assert answers[1].token_id is None
    assert "not finite" in str(answers[1].error)
    for i in (0, 2):
        assert answers[i] == draw(logits[i], sequences[i])
        assert answers[i].error is None


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_nothing_left_to_choose_fails_its_own_draw_alone(settings: dict[str, Any]) -> None:
    logits = torch.stack([random_logits(0, vocab=4), random_logits(1, vocab=4)])
    forbidden = sequence_of(bad_word_token_ids=[[0], [1], [2], [3]], **settings)
    answers = sample(logits, [Draw(0, forbidden), Draw(1, sequence_of(**settings))])
    assert answers[0].token_id is None
    assert "no token" in str(answers[0].error)
    assert answers[1].error is None


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}])
def test_a_row_without_any_finite_logit_fails(settings: dict[str, Any]) -> None:
    assert draw(torch.full((VOCAB,), -torch.inf), sequence_of(**settings)).error is not None


def test_tokens_the_model_itself_rules_out_are_no_error() -> None:
    logits = random_logits(0)
    logits[10:] = -torch.inf
    for settings in ({"temperature": 0.0}, {}, {"top_k": 30}, {"top_p": 0.99}):
        token_id = draw(logits, sequence_of(**settings)).token_id
        assert token_id is not None
        assert token_id < 10


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(5)
    expected = logits.double().log_softmax(-1)
    order = sorted(range(VOCAB), key=lambda i: (-float(logits[i]), i))
    sequence = sequence_of([8], logprobs=4, temperature=2.0, top_k=50, logit_bias={order[0]: -100.0}, seed=3)
    sampled = draw(logits, sequence)
    assert sampled.token_id is not None
    assert sampled.token_id != order[0]
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen.token_id == sampled.token_id
    assert sampled.logprobs.chosen.rank == order.index(sampled.token_id) + 1
    assert sampled.logprobs.chosen.logprob == pytest.approx(float(expected[sampled.token_id]), abs=1e-5)
    assert [top.token_id for top in sampled.logprobs.top] == order[:4]
    assert [top.rank for top in sampled.logprobs.top] == [1, 2, 3, 4]
    for top in sampled.logprobs.top:
        assert top.logprob == pytest.approx(float(expected[top.token_id]), abs=1e-5)


def test_logprobs_zero_reports_the_chosen_token_alone() -> None:
    sampled = draw(random_logits(5), sequence_of(logprobs=0))
    assert sampled.logprobs is not None
    assert sampled.logprobs.top == ()
    assert draw(random_logits(5), sequence_of()).logprobs is None


@pytest.mark.parametrize("num_top", [1, 2, 3, 5])
def test_equal_logprobs_rank_by_id(num_top: int) -> None:
    logits = torch.zeros(VOCAB)
    logits[[40, 600]] = 3.0
    logprobs = draw(logits, sequence_of(logprobs=num_top, temperature=0.0)).logprobs
    assert logprobs is not None
    assert [top.token_id for top in logprobs.top] == [40, 600, 0, 1, 2][:num_top]
    other = draw(logits, sequence_of(logprobs=0, top_k=1, logit_bias={40: -50.0})).logprobs
    assert other is not None
    assert (other.chosen.token_id, other.chosen.rank) == (600, 2)
