"""exllamav2 #274; vLLM #42533, #57941: proposals beyond the end of the context, or of the draft's shorter one.

Kind: every bound that proposals may cross. Siblings: max_tokens, the pool, the step's budget, a bound in the middle of
a block, prompts of limit-1 to limit-7, a draft whose context ends inside the prompt, inside the output, at its border.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import LoadedModel
from tests.cases.trial import Trial, prompt_of
from tests.models import make_tiny_model

LIMIT = 64
LOOP = [41, 42, 43] * 40
BIAS = {41: 9.0, 42: 9.0, 43: 9.0}


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Models like the tiny one, by their context."""
    folder = tmp_path_factory.mktemp("drafts")
    return {
        length: str(make_tiny_model(folder / str(length), overrides={"max_position_embeddings": length}))
        for length in (16, 59, 60, 61, 62)
    }


@pytest.mark.parametrize("proposer", ["ngram", "suffix", "self"])
@pytest.mark.parametrize("num_left", [1, 2, 3, 4, 5, 6, 7])
def test_exactly_the_remaining_tokens(tiny: LoadedModel, tiny_folder: Path, proposer: str, num_left: int) -> None:
    """K = 5, prompts that leave 1 to 7 places."""
    engine = trial(tiny, tiny_folder, speculative=proposer)
    output = engine.ask(LOOP[: LIMIT - num_left], temperature=0.0, logit_bias=BIAS).choices[0]
    assert (len(output.token_ids), output.finish_reason) == (num_left, "length")
    assert output.token_ids == unspeculated(tiny, LOOP[: LIMIT - num_left], logit_bias=BIAS)


@pytest.mark.parametrize("draft_len", [16, 59, 60, 61, 62])
@pytest.mark.parametrize("prompt_len", [8, 15, 16, 17, 57, 61])
def test_a_draft_with_a_shorter_context(
    tiny: LoadedModel, tiny_folder: Path, drafts: dict[int, str], draft_len: int, prompt_len: int
) -> None:
    """It drafts up to its end and then no more; the target goes on to its own."""
    engine = trial(tiny, tiny_folder, speculative="draft", speculative_model=drafts[draft_len])
    output = engine.ask(prompt_of(prompt_len), temperature=0.0).choices[0]
    assert (len(output.token_ids), output.finish_reason) == (LIMIT - prompt_len, "length")
    assert output.token_ids == unspeculated(tiny, prompt_of(prompt_len))
    stats = engine.llm.stats()
    assert (stats.num_drafted_tokens > 0) == (prompt_len < draft_len)
    assert stats.num_accepted_tokens == stats.num_drafted_tokens, "a twin within its context is always right"


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 11])
def test_max_tokens_inside_what_would_be_accepted(tiny: LoadedModel, tiny_folder: Path, max_tokens: int) -> None:
    engine = trial(tiny, tiny_folder, speculative="ngram")
    output = engine.ask(LOOP[:20], temperature=0.0, logit_bias=BIAS, max_tokens=max_tokens).choices[0]
    assert (len(output.token_ids), output.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize("num_kv_blocks", [8, 9])
def test_a_pool_that_holds_the_context_and_no_more(tiny: LoadedModel, tiny_folder: Path, num_kv_blocks: int) -> None:
    engine = trial(tiny, tiny_folder, speculative="ngram", num_kv_blocks=num_kv_blocks, num_speculative_tokens=20)
    for index in range(2):
        engine.add(str(index), LOOP[: 40 + index], temperature=0.0, logit_bias=BIAS)
    engine.run()
    for index in range(2):
        assert engine.output(str(index)).choices[0].token_ids == unspeculated(tiny, LOOP[: 40 + index], logit_bias=BIAS)


def trial(tiny: LoadedModel, folder: Path, **changes: Any) -> Trial:
    return Trial(
        tiny,
        folder=folder,
        max_model_len=LIMIT,
        **{"num_speculative_tokens": 5, "speculative_adaptive": False, **changes},
    )


def unspeculated(tiny: LoadedModel, prompt: list[int], **params: Any) -> list[int]:
    return Trial(tiny, max_model_len=LIMIT).ask(prompt, temperature=0.0, **params).choices[0].token_ids
