"""Models that draft: a smaller one, and the target's int8 copy; tokens never change, whatever they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, LoadedModel
from engine.errors import InvalidConfig
from engine.plan import Plan, StepResult
from engine.runner import TorchRunner, load_runner
from tests.cases.trial import Trial, prompt_of
from tests.models import make_tiny_model
from tests.speculation.test_spec_runner import KINDS

ALWAYS: dict[str, Any] = {"speculative_adaptive": False, "num_speculative_tokens": 4}


@pytest.fixture(scope="session")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models beside the tiny one: its twin, a stranger, its twin with a short context."""
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "twin": make_tiny_model(folder / "twin"),
        "stranger": make_tiny_model(folder / "stranger", seed=5, overrides={"num_hidden_layers": 1}),
        "short": make_tiny_model(folder / "short", overrides={"max_position_embeddings": 24}),
    }


def settings(kind: str, drafts: dict[str, Path], folder: Path) -> dict[str, Any]:
    if kind == "self":
        return {"speculative": "self", "folder": folder, **ALWAYS}
    return {"speculative": "draft", "speculative_model": str(drafts[kind]), "folder": folder, **ALWAYS}


@pytest.mark.parametrize("draft", ["twin", "stranger", "short", "self"])
@pytest.mark.parametrize("kind", ["greedy", "seeded", "filtered", "penalties", "min_tokens", "n4"])
def test_tokens_are_those_without_a_draft(
    tiny: LoadedModel, tiny_folder: Path, drafts: dict[str, Path], draft: str, kind: str
) -> None:
    engine = Trial(tiny, **settings(draft, drafts, tiny_folder))
    for index in range(3):
        engine.add(str(index), prompt_of(6 + 8 * index, seed=index), **{"max_tokens": 18, "logprobs": 1, **KINDS[kind]})
    engine.run()
    stats = engine.llm.stats()
    if draft == "twin":
        assert stats.num_accepted_tokens == stats.num_drafted_tokens > 20
    elif draft == "stranger":
        assert stats.num_accepted_tokens < stats.num_drafted_tokens
    elif draft == "self":
        assert stats.num_accepted_tokens > 0.2 * stats.num_drafted_tokens > 4
    else:
        assert 0 < stats.num_accepted_tokens == stats.num_drafted_tokens
    engine.assert_all_as_alone()


@pytest.mark.parametrize("draft", ["twin", "self"])
@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_blocks": 17, "num_host_slots": 12, "preemption_mode": "swap"},
        {"num_kv_blocks": 17, "preemption_mode": "recompute"},
        {"max_num_batched_tokens": 16, "max_num_seqs": 9},
    ],
)
def test_preemption_swap_chunks_and_cached_prefixes(
    tiny: LoadedModel, tiny_folder: Path, drafts: dict[str, Path], draft: str, changes: dict[str, Any]
) -> None:
    """A draft that is always right stays so, wherever its KV has to be computed anew."""
    engine = Trial(tiny, **{**settings(draft, drafts, tiny_folder), **changes})
    for turn in range(2):
        for index, kind in enumerate(("greedy", "seeded", "n4", "penalties")):
            prompt = prompt_of(17) + [index] * (1 + index)
            engine.add(f"{kind}{turn}", prompt, **{"max_tokens": 16, **KINDS[kind]})
        engine.run()
    stats = engine.llm.stats()
    assert stats.num_prefix_hit_tokens > 0
    if "num_kv_blocks" in changes:
        assert stats.num_preempted_recompute + stats.num_preempted_swap > 0
    if draft == "twin":
        assert stats.num_accepted_tokens == stats.num_drafted_tokens
    engine.assert_all_as_alone()


def test_a_draft_that_paused_catches_up(tiny: LoadedModel, tiny_folder: Path, drafts: dict[str, Path]) -> None:
    """Steps without proposals leave its KV behind; prompts longer than a forward of it, too."""
    engine = Trial(tiny, **settings("twin", drafts, tiny_folder), max_num_batched_tokens=40, max_num_seqs=8)
    speculator = engine.llm._scheduler.speculator
    propose = speculator.propose
    engine.add("a", prompt_of(30), temperature=0.0, max_tokens=40)
    for step in range(60):
        speculator.propose = propose if step % 7 > 3 else (lambda rows, most: [[] for _ in rows])
        if engine.llm.has_unfinished():
            engine.step()
    stats = engine.llm.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 10
    engine.assert_all_as_alone()


def test_drafts_of_another_vocabulary_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """Kinds: more tokens, fewer, as many with other strings."""
    larger = make_tiny_model(tmp_path / "larger", overrides={"vocab_size": 336})
    other = make_tiny_model(tmp_path / "other")
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace('"unused7"', '"differs7"'))
    for draft in (larger, other):
        config = EngineConfig(speculative="draft", speculative_model=str(draft), num_kv_blocks=8, num_threads=1)
        with pytest.raises(InvalidConfig, match="speculative_model"):
            load_runner(str(tiny_folder), config)


def test_self_needs_a_float32_target_on_the_native_path(tiny_folder: Path) -> None:
    for changes in ({"cpu_kernels": "torch"}, {"dtype": "int8"}):
        with pytest.raises(InvalidConfig, match="speculative"):
            load_native_or_raise(tiny_folder, speculative="self", **changes)


def load_native_or_raise(folder: Path, **changes: Any) -> LoadedModel:
    return load_runner(str(folder), EngineConfig(num_kv_blocks=8, num_threads=1, **changes))


def test_a_forward_that_failed_drafts_the_same_again(
    tiny: LoadedModel, tiny_folder: Path, drafts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [2, 4]
    execute = TorchRunner._execute

    def failing(self: TorchRunner, plan: Plan) -> StepResult:
        result = execute(self, plan)
        if plan.step_index in fails:
            fails.remove(plan.step_index)
            raise RuntimeError("after all was done")
        return result

    engine = Trial(tiny, **settings("twin", drafts, tiny_folder))
    for index in range(3):
        engine.add(str(index), prompt_of(9, seed=index), temperature=1.0, max_tokens=20)
    monkeypatch.setattr(TorchRunner, "_execute", failing)
    engine.run()
    monkeypatch.undo()
    assert not fails
    stats = engine.llm.stats()
    assert stats.num_accepted_tokens == stats.num_drafted_tokens > 20
    engine.assert_all_as_alone()
