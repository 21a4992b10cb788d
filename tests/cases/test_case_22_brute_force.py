"""vLLM #31081, PR#7007, #7965: beams that end early, or a length penalty, give other sequences than beam search has.

Kind: which sequences come back, and with which scores. Siblings: penalties below and above 1, 0 and negative; the three
ways to stop; widths from 1 to more than there are sequences; ends among the candidates and behind the first of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from engine.config import LoadedModel
from engine.outputs import Choice
from tests import beam_reference
from tests.cases.conftest import load_native
from tests.cases.trial import Trial
from tests.models import EOS_TOKEN_ID, make_tiny_model

VOCABULARY = 5
PROMPTS = [[1, 3, 4], [4], [3, 3, 0, 1, 4, 0, 1, 1, 3]]

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-vocabulary"), overrides={"vocab_size": VOCABULARY}, seed=4)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_native(folder, num_threads=1)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return beam_reference.theirs(folder)


def ours(loaded: LoadedModel, prompt: list[int], **params: Any) -> list[Choice]:
    engine = Trial(loaded, num_kv_blocks=200, max_num_seqs=128)
    return engine.ask(prompt, use_beam_search=True, ignore_eos=False, **params).choices


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("length_penalty", [0.5, 2.0, 1.0, 0.0, -1.0])
def test_width_four_finds_the_best_of_all(
    loaded: LoadedModel, theirs: Any, prompt: list[int], length_penalty: float
) -> None:
    """Two tokens: four live beams are all there are, so the four best of all sequences are found."""
    every = beam_reference.all_sequences(theirs, prompt, [EOS_TOKEN_ID], max_tokens=2, length_penalty=length_penalty)
    assert len(every) == 1 + 4 * VOCABULARY
    choices = ours(loaded, prompt, n=4, max_tokens=2, length_penalty=length_penalty, early_stopping="never")
    beam_reference.assert_same(choices, every[:4])


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("length_penalty", [0.5, 2.0])
def test_enough_width_finds_the_best_of_all_longer_ones(
    loaded: LoadedModel, theirs: Any, prompt: list[int], length_penalty: float
) -> None:
    """Four tokens: no more than 4**3 beams are ever live, and as many of their continuations may end."""
    every = beam_reference.all_sequences(theirs, prompt, [EOS_TOKEN_ID], max_tokens=4, length_penalty=length_penalty)
    params = {"max_tokens": 4, "length_penalty": length_penalty, "early_stopping": "never"}
    choices = ours(loaded, prompt, n=4, best_of=80, **params)
    beam_reference.assert_same(choices, every[:4])


@pytest.mark.parametrize("length_penalty", [0.5, 2.0, 0.0, -1.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("stops", [[EOS_TOKEN_ID], [EOS_TOKEN_ID, 0]])
def test_width_four_as_transformers(
    loaded: LoadedModel,
    theirs: Any,
    length_penalty: float,
    early_stopping: bool | Literal["never"],
    stops: list[int],
) -> None:
    shape: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    for prompt in PROMPTS[:2]:
        for max_tokens in (3, 14):
            expected = beam_reference.generated(theirs, prompt, 4, stops, max_new_tokens=max_tokens, **shape)
            choices = ours(loaded, prompt, n=4, max_tokens=max_tokens, stop_token_ids=stops[1:], **shape)
            beam_reference.assert_same(choices, expected)
            for choice in choices:
                assert choice.finish_reason == ("stop" if choice.token_ids[-1] in stops else "length")
                assert choice.stop_reason == (0 if choice.token_ids[-1] == 0 and 0 in stops else None)


def test_more_beams_than_sequences(loaded: LoadedModel, theirs: Any) -> None:
    """One token: there are five sequences. What is asked beyond them ends by name, the rest is whole."""
    every = beam_reference.all_sequences(theirs, [1, 3], [EOS_TOKEN_ID], max_tokens=1, length_penalty=1.0)
    choices = ours(loaded, [1, 3], n=7, max_tokens=1)
    beam_reference.assert_same(choices[:VOCABULARY], every)
    for choice in choices[VOCABULARY:]:
        assert choice.finish_reason == "error" and not choice.token_ids and choice.score is None
        assert choice.error is not None and "fewer continuations" in choice.error
