"""Rejection is lossless: what comes out is distributed as direct sampling, whatever is proposed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.config import LoadedModel
from engine.gumbel_max import draw_from_all
from engine.noise import DrawKey
from engine.params import SamplingParams
from engine.speculation.rejection import decide, probabilities
from tests.cases.trial import Trial
from tests.models import make_tiny_model

VOCAB = 6
NUM_SEEDS = 4_000
PARAMS = SamplingParams(temperature=0.7, top_p=0.95)


def chi_square_bound(degrees: int) -> float:
    """4 deviations by Wilson and Hilferty's cube: one in about 30,000. Seeds are fixed, so always or never."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 4 * sqrt(spread)) ** 3)


def chi_square(counts: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> tuple[float, int]:
    expected = counts.sum() * shares
    is_possible = expected > 0
    assert not counts[~is_possible].any(), "a token that cannot be drawn was"
    gaps = (counts - expected)[is_possible] ** 2 / expected[is_possible]
    return float(gaps.sum()), int(is_possible.sum()) - 1


def logits_of(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def drawn(logits: npt.NDArray[np.float32], key: DrawKey) -> int:
    shares = probabilities(logits, PARAMS)
    with np.errstate(divide="ignore"):
        logs = np.log(shares).astype(np.float32)[None]
    return draw_from_all(logs, logs.argmax(1), [key], [1.0])[0]


@pytest.mark.parametrize("case", range(6))
def test_a_token_decided_about_is_distributed_as_one_drawn(case: int) -> None:
    """Proposers: near the target, far from it, the same, and one that is always certain of one token."""
    target = logits_of(case)
    draft = [logits_of(50 + case), target + 0.3 * logits_of(70 + case), -target, target, None, None][case]
    counts = np.zeros(VOCAB)
    num_kept = 0
    for seed in range(NUM_SEEDS):
        key = DrawKey(seed, 0, 3)
        proposal = case % VOCAB if draft is None else drawn(draft, key)
        token_id = decide(target, draft, proposal, PARAMS, key)
        num_kept += token_id == proposal
        counts[token_id] += 1
    shares = probabilities(target, PARAMS)
    statistic, degrees = chi_square(counts, shares)
    assert statistic < chi_square_bound(degrees)
    proposed = probabilities(draft, PARAMS) if draft is not None else np.eye(VOCAB)[case % VOCAB]
    expected = np.minimum(shares, proposed).sum()
    assert num_kept / NUM_SEEDS == pytest.approx(expected, abs=0.03), "accepted as often as the two overlap"


def test_the_statistic_finds_a_draw_that_is_off() -> None:
    """The same test of a rule that gives every possible token alike in a third of the cases must fail."""
    target, draft = logits_of(1), logits_of(51)
    shares = probabilities(target, PARAMS)
    possible = np.flatnonzero(shares)
    counts = np.zeros(VOCAB)
    for seed in range(NUM_SEEDS):
        key = DrawKey(seed, 0, 3)
        token_id = decide(target, draft, drawn(draft, key), PARAMS, key)
        counts[token_id if seed % 3 else possible[seed // 3 % len(possible)]] += 1
    statistic, degrees = chi_square(counts, shares)
    assert statistic > chi_square_bound(degrees)


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("drafts") / "stranger", seed=5, overrides={"num_hidden_layers": 1})


@pytest.mark.parametrize("speculative", ["ngram", "draft"])
def test_whole_outputs_are_distributed_as_without(
    tiny: LoadedModel, tiny_folder: Path, stranger: Path, speculative: str
) -> None:
    """Three tokens of four that are possible, 640 outputs of each way: two samples of one distribution."""
    model = str(stranger) if speculative == "draft" else None
    counts = []
    for is_speculating in (False, True):
        changes = {"speculative": speculative, "speculative_model": model, "speculative_verification": "rejection",
                   "speculative_adaptive": False, "num_speculative_tokens": 2}  # fmt: skip
        engine = Trial(tiny, num_kv_blocks=512, max_num_seqs=128, max_num_batched_tokens=1024, folder=tiny_folder,
                       **(changes if is_speculating else {}))  # fmt: skip
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(5):
            output = engine.ask([20, 21, 22] * 3, n=128, seed=seed + 1000 * is_speculating, max_tokens=4,
                                logit_bias={20: 9.0, 21: 9.0, 22: 9.0}, temperature=1.5, top_k=3)  # fmt: skip
            found.update(tuple(choice.token_ids[1:]) for choice in output.choices)
        counts.append(found)
        if is_speculating:
            stats = engine.llm.stats()
            assert 100 < stats.num_accepted_tokens < stats.num_drafted_tokens
    outcomes = [each for each in counts[0] | counts[1] if counts[0][each] + counts[1][each] >= 10]
    statistic = sum((counts[0][each] - counts[1][each]) ** 2 / (counts[0][each] + counts[1][each]) for each in outcomes)
    assert len(outcomes) > 8
    assert statistic < chi_square_bound(len(outcomes) - 1)


def test_greedy_and_repeatable(trial: Callable[..., Trial]) -> None:
    """Greedy tokens are the target's own; sampled ones are the same for a seed; logprobs are of what came out."""
    settings = {"speculative": "ngram", "speculative_verification": "rejection", "speculative_adaptive": False}
    engine = trial(**settings)
    bias = {11: 12.0, 12: 12.0, 13: 12.0}
    engine.add("greedy", [11, 12, 13] * 6, temperature=0.0, max_tokens=20, logit_bias=bias)
    engine.run()
    engine.assert_all_as_alone()
    asked = [
        trial(**settings).ask([11, 12, 13] * 6, seed=4, max_tokens=20, logit_bias=bias, logprobs=2).choices[0]
        for _ in range(2)
    ]
    assert asked[0].token_ids == asked[1].token_ids
    assert [position.chosen.token_id for position in asked[0].logprobs or []] == asked[0].token_ids
