"""Sampling in Triton's interpreter against the reference, and the reference against the engine's own sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engine import noise as engine_noise
from kernels.sampling import noise, reference
from kernels.sampling.draws import Drawn, Draws, Outcome, Support, TokenEdits
from tests.kernels.interpreted import KERNELS, interpreted, poisoned, values

__all__ = ["poisoned"]

sampling = KERNELS["sampling"]
CPU = torch.device("cpu")
VOCAB = 5000  # three chunks, the last one cut
KEYS = [(0, 0, 0), (1, 2, 3), (-1, 0, 70000), (0x0123456789ABCDEF, 7, 1), (2**62 + 12345, 2**31 - 1, 2**31 - 1)]


tl, gumbel_noise = sampling.tl, sampling.gumbel_noise


@interpreted
def _store_noise(noise_ptr, seed, choice, output_index, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
    tl.store(noise_ptr + tl.arange(0, CHUNK), gumbel_noise(seed, choice, output_index, 4096, CHUNK))


@dataclass
class Edit:
    token_id: int
    bias: float = 0.0
    is_seen: bool = False
    count: int = 0


@dataclass
class Draw:
    place: int = 0
    temperature: float = 0.0
    key: tuple[int, int, int] = (0, 0, 0)
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)  # repetition, frequency, presence
    edits: list[Edit] = field(default_factory=list)


def draws_of(draws: list[Draw]) -> Draws:
    def column(found: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(found, dtype=dtype)

    return Draws(
        places=column([draw.place for draw in draws], torch.int64),
        temperatures=column([draw.temperature for draw in draws], torch.float32),
        seeds=column([draw.key[0] for draw in draws], torch.int64),
        choices=column([draw.key[1] for draw in draws], torch.int32),
        output_indices=column([draw.key[2] for draw in draws], torch.int32),
        repetition_penalties=column([draw.penalties[0] for draw in draws], torch.float32),
        frequency_penalties=column([draw.penalties[1] for draw in draws], torch.float32),
        presence_penalties=column([draw.penalties[2] for draw in draws], torch.float32),
    )


def edits_of(draws: list[Draw]) -> TokenEdits:
    edits = [edit for draw in draws for edit in draw.edits]
    starts = np.cumsum([0, *(len(draw.edits) for draw in draws)])
    return TokenEdits(
        starts=torch.from_numpy(starts),
        token_ids=torch.tensor([edit.token_id for edit in edits], dtype=torch.int64),
        biases=torch.tensor([edit.bias for edit in edits], dtype=torch.float32),
        is_seen=torch.tensor([edit.is_seen for edit in edits], dtype=torch.bool),
        output_counts=torch.tensor([edit.count for edit in edits], dtype=torch.int32),
    )


def sample(
    logits: torch.Tensor, draws: list[Draw], support: Support | None = None, mask: torch.Tensor | None = None
) -> tuple[list[int | None], list[Outcome]]:
    """The kernel's tokens (None where there is none) and outcomes, checked against the reference's."""
    edits = edits_of(draws) if any(draw.edits for draw in draws) else None
    before = logits.clone()
    found = read(sampling.sample(logits, draws_of(draws), edits, support, mask))
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    assert found == read(reference.sample(logits, draws_of(draws), edits, support, mask))
    return found


def read(drawn: Drawn) -> tuple[list[int | None], list[Outcome]]:
    outcomes = [Outcome(outcome) for outcome in drawn.outcomes.tolist()]
    assert all(token_id == 0 for token_id in drawn.token_ids[drawn.outcomes != Outcome.TOKEN].tolist())
    token_ids = [
        token_id if outcome == Outcome.TOKEN else None
        for token_id, outcome in zip(drawn.token_ids.tolist(), outcomes, strict=True)
    ]
    return token_ids, outcomes


@pytest.mark.parametrize("key", KEYS)
def test_the_reference_s_noise_is_the_engine_s(key: tuple[int, int, int]) -> None:
    expected = engine_noise.gumbel_noise(*key, 4099)
    np.testing.assert_array_max_ulp(noise.gumbel_noise(*key, 4099, CPU).numpy(), expected, maxulp=1)


@pytest.mark.parametrize("key", KEYS)
def test_the_kernel_s_noise_is_the_engine_s(key: tuple[int, int, int]) -> None:
    found = torch.full((2048,), torch.nan)
    _store_noise[(1,)](found, *key, CHUNK=2048)
    expected = engine_noise.gumbel_noise(*key, 4096 + 2048)[4096:]
    np.testing.assert_array_max_ulp(found.numpy(), expected, maxulp=1)


@pytest.mark.parametrize("vocab", [1, 3, 127, 2048, 2049, VOCAB])
def test_greedy_and_seeded_draws_of_many_vocabularies(vocab: int) -> None:
    logits = values(3, vocab) * 3
    draws = [
        Draw(place, temperature, key)
        for place, temperature, key in zip((0, 1, 2, 2), (0, 1, 0.3, 5), KEYS, strict=False)
    ]
    token_ids, _ = sample(logits, draws)
    assert token_ids[0] == int(logits[0].argmax())


def test_draws_are_the_engine_s() -> None:
    logits = values(4, VOCAB) * 2
    draws = [Draw(row % 4, 0.7, (row * 991, row % 3, row)) for row in range(12)]
    token_ids, _ = sample(logits, draws)
    for draw, token_id in zip(draws, token_ids, strict=True):
        noised = logits[draw.place].numpy() + np.float32(0.7) * engine_noise.gumbel_noise(*draw.key, VOCAB)
        assert token_id == int(noised.argmax())
    assert len(set(token_ids)) > 6


def test_ties_take_the_lower_id() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [4800, 300, 2047]] = 1.0
    logits[2, 3000:] = 1.0
    assert sample(logits, [Draw(0), Draw(1), Draw(2)])[0] == [0, 300, 3000]


def test_a_large_vocabulary_s_tie_takes_the_lower_id() -> None:
    logits = torch.zeros(1, 280_000)
    logits[0, [5 * 2048 + 7, 133 * 2048]] = 1.0  # one place apart in the join: 128 chunks
    assert sample(logits, [Draw()])[0] == [5 * 2048 + 7]


def test_penalties_biases_and_forbidden_tokens() -> None:
    logits = values(2, VOCAB)
    top = logits[0].argsort(descending=True).tolist()
    bottom = int(logits[0].argmin())
    draws = [
        Draw(edits=[Edit(top[0], is_seen=True)], penalties=(100.0, 0.0, 0.0)),
        Draw(edits=[Edit(top[0], is_seen=True)]),  # seen, but nothing is penalized
        Draw(edits=[Edit(top[0], is_seen=True), Edit(top[1], is_seen=True, count=2)], penalties=(1.0, 3.0, 0.0)),
        Draw(edits=[Edit(token_id, is_seen=True, count=1) for token_id in top[:200]], penalties=(1.0, 0.0, 9.0)),
        Draw(edits=[Edit(token_id, bias=-torch.inf) for token_id in top[:300]]),
        Draw(edits=[Edit(bottom, bias=100.0)]),
        Draw(1, 1.0, (5, 0, 0)),
        Draw(edits=[Edit(bottom, bias=100.0, is_seen=True, count=3)], penalties=(1.3, 0.2, 0.1), temperature=0.9),
    ]
    token_ids, _ = sample(logits, draws)
    assert token_ids[:6] == [top[1], top[0], top[0], top[200], top[300], bottom]


def test_every_token_edited_at_once() -> None:
    logits = values(1, 700) * 4
    edits = [Edit(i, bias=(i % 7) - 3.0, is_seen=i % 3 > 0, count=i % 3) for i in range(700)]
    for temperature in (0.0, 1.0):
        sample(logits, [Draw(0, temperature, (3, 1, 4), (1.7, 0.3, 0.6), edits)])


def test_a_support_leaves_the_head_of_the_ranking() -> None:
    logits = values(1, VOCAB)
    logits[0, [10, 2500, 4900]] = 9.0
    floors = torch.tensor([9.0, 9.0, -torch.inf, float(logits[0].sort().values[-9])])
    support = Support(floors, torch.tensor([9, 2500, 5000, 5000]))
    draws = [Draw(0, 1.0, (index, 0, 0)) for index in range(4)]
    token_ids, outcomes = sample(logits, draws, support)
    assert outcomes == [Outcome.EMPTY, Outcome.TOKEN, Outcome.TOKEN, Outcome.TOKEN]
    for key in range(12):
        drawn = sample(logits, [Draw(0, 50.0, (key, 0, 0))], Support(torch.tensor([9.0]), torch.tensor([2500])))[0][0]
        assert drawn in (10, 2500)
    assert token_ids[1] in (10, 2500)


@pytest.mark.parametrize("vocab", [31, 32, 2049, VOCAB])
def test_a_mask_leaves_its_tokens(vocab: int) -> None:
    logits = values(2, vocab)
    allowed = values(3, vocab, seed=9) > 0.5
    allowed[:, vocab - 1] = True
    allowed[2] = False
    padded = torch.zeros(3, (vocab + 31) // 32 * 32, dtype=torch.int64)
    padded[:, :vocab] = allowed
    mask = (padded.view(3, -1, 32) << torch.arange(32)).sum(2).to(torch.int32)
    token_ids, outcomes = sample(logits, [Draw(0), Draw(1, 2.0, (1, 1, 1)), Draw(0)], mask=mask)
    assert outcomes == [Outcome.TOKEN, Outcome.TOKEN, Outcome.EMPTY]
    assert token_ids[0] == int(logits[0].masked_fill(~allowed[0], -torch.inf).argmax())
    assert token_ids[1] is not None and allowed[1, token_ids[1]]


def test_one_bad_row_spoils_its_own_draws_alone() -> None:
    logits = values(5, VOCAB)
    logits[1, 4321] = torch.nan
    logits[2, 17] = torch.inf
    logits[3] = -torch.inf
    draws = [Draw(row, temperature, (row, 0, 0)) for row in range(5) for temperature in (0.0, 1.0)]
    _, outcomes = sample(logits, draws)
    bad, empty, token = Outcome.NOT_FINITE, Outcome.EMPTY, Outcome.TOKEN
    assert outcomes == [token, token, bad, bad, bad, bad, empty, empty, token, token]


def test_no_draws() -> None:
    assert sample(values(2, 8), []) == ([], [])


def test_logits_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        sampling.sample(values(1, 8).half(), draws_of([Draw()]))
