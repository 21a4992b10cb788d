"""Guided output through the engine: what comes out fits, whatever else happens to the request or beside it."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, EngineConfig, InvalidRequest, SamplingParams
from engine.config import LoadedModel
from engine.errors import InvalidConfig
from engine.fake_runner import load_fake
from engine.guided.compiler import GrammarCompiler
from engine.params import Guided
from engine.sampler import Draw, sample
from engine.text.tokenizer import Tokenizer
from tests.cases.trial import Trial, prompt_of
from tests.conftest import skip_or_fail
from tests.engine.runner_aids import load, new_sequence

SCHEMAS50 = [json.loads(line) for line in (Path(__file__).parent / "schemas50.jsonl").read_text().splitlines()]
"""As people write them; every string and list is bounded, so that an output of some length ends."""

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "ages": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "json": {"json": RECORD},
    "regex": {"regex": "[ab]{2,6}(x|yz)"},
    "choice": {"choice": ["yes", "no", "perhaps not", "日本"]},
    "grammar": {"grammar": 'start: "[" number ("," number)~0..3 "]"\nnumber: /[0-9]{1,2}/'},
}

COUNTED = {  # what llguidance takes no tokens of back
    "word": 'start: ("name: " x ";\\n")+\nx[max_tokens=30]: /[a-z ]+/',
    "forced": 'start: "a: " x ";"\nx[max_tokens=4]: /[ab] is the name of it( too)?/',
    "record": 'start: "Here: " rec ";"\nrec[max_tokens=24]: %json ' + json.dumps(RECORD),
    "stop": 'start: ("say: " x ".")+\nx[stop=";"]: /[a-z]+/',
    "unforced": '%llguidance {"no_forcing": true}\nstart: (x "; ")+\nx[max_tokens=5]: /[a-z]+ years old/',
}


@pytest.fixture(scope="session")
def exact_tiny(tiny_folder: Path) -> LoadedModel:
    """On the native path, where nothing is forgiven; the fake model and the real one follow below."""
    try:
        return load(tiny_folder, cpu_kernels="native", num_threads=1)
    except InvalidConfig as error:
        skip_or_fail(str(error))
        raise


def fits(kind: str, text: str) -> bool:
    if kind == "json":
        jsonschema.validate(json.loads(text), RECORD)
        return True
    if kind == "choice":
        return text in KINDS["choice"]["choice"]
    pattern = "[ab]{2,6}(x|yz)" if kind == "regex" else r"\[\d{1,2}(,\d{1,2}){0,3}\]"
    return re.fullmatch(pattern, text) is not None


def guided(kind: str, **more: Any) -> dict[str, Any]:
    """Parameters; `ignore_eos` and `seed` are what `Trial` would set else."""
    return {"guided": Guided(**KINDS[kind]), "ignore_eos": False, "max_tokens": 120, **more}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 1.5, "seed": 3, "n": 3}], ids=["greedy", "T1.5"]
)
def test_each_kind_fits(exact_tiny: LoadedModel, kind: str, params: dict[str, Any]) -> None:
    trial = Trial(exact_tiny)
    output = trial.ask(prompt_of(12), **guided(kind, **params))
    for choice in output.choices:
        assert choice.finish_reason == "stop", choice
        assert fits(kind, choice.text)
    trial.assert_all_as_alone()


def test_in_any_company_and_after_preemption_and_swap_the_output_is_its_own(exact_tiny: LoadedModel) -> None:
    for more in ({"num_kv_blocks": 16}, {"num_kv_blocks": 16, "num_host_slots": 64, "preemption_mode": "swap"}):
        trial = Trial(exact_tiny, max_num_batched_tokens=64, **more)
        for index, kind in enumerate(KINDS):
            prompt = prompt_of(10 + index, seed=index)
            trial.add(
                f"guided{index}", prompt, **guided(kind, temperature=1.2, seed=index, n=1 + index % 2, max_tokens=60)
            )
            trial.add(f"free{index}", prompt, max_tokens=60, temperature=float(index % 2))
        trial.run()
        for index, kind in enumerate(KINDS):
            assert all(fits(kind, choice.text) for choice in trial.output(f"guided{index}").choices)
        assert sum(
            delta.timeline.num_preemptions for deltas in trial.deltas.values() for delta in deltas if delta.timeline
        )
        trial.assert_all_as_alone()


def test_it_goes_on_behind_what_an_earlier_life_emitted(exact_tiny: LoadedModel) -> None:
    params = guided("json", temperature=1.0, seed=5, n=2)
    whole = Trial(exact_tiny).ask(prompt_of(9), **params)
    for cut in (1, 4, 9):
        trial = Trial(exact_tiny)
        trial.add("again", prompt_of(9), emitted=[choice.token_ids[:cut] for choice in whole.choices], **params)
        trial.run()
        for ours, theirs in zip(trial.output("again").choices, whole.choices, strict=True):
            assert theirs.token_ids[:cut] + ours.token_ids == theirs.token_ids


def test_other_parameters_hold_beside_the_grammar(exact_tiny: LoadedModel) -> None:
    trial = Trial(exact_tiny)
    free = trial.ask(prompt_of(9), **guided("choice", temperature=0.0, logprobs=3))
    assert free.choices[0].logprobs is not None
    assert all(len(position.top) == 3 for position in free.choices[0].logprobs)  # of the raw distribution
    first = free.choices[0].token_ids[0]
    other = trial.ask(prompt_of(9), **guided("choice", temperature=0.0, logit_bias={first: -100.0}))
    assert other.choices[0].token_ids[0] != first and fits("choice", other.choices[0].text)
    short = trial.ask(prompt_of(9), **guided("json", temperature=0.0, max_tokens=3))
    assert short.choices[0].finish_reason == "length" and len(short.choices[0].token_ids) == 3
    stopped = trial.ask(prompt_of(9), **guided("grammar", temperature=0.0, stop=["]"]))
    assert stopped.choices[0].finish_reason == "stop" and stopped.choices[0].stop_reason == "]"


def test_a_grammar_at_odds_with_min_tokens_fails_its_choice_alone(exact_tiny: LoadedModel) -> None:
    trial = Trial(exact_tiny)
    trial.add("odd", prompt_of(9), **guided("choice", min_tokens=100))
    trial.add("even", prompt_of(10), max_tokens=12)
    trial.run()
    assert trial.output("odd").choices[0].finish_reason == "error"
    assert "leave no token" in (trial.output("odd").choices[0].error or "")
    assert trial.output("even").choices[0].finish_reason == "length"


def test_what_cannot_be_compiled_is_refused_and_nothing_is_queued(exact_tiny: LoadedModel) -> None:
    trial = Trial(exact_tiny)
    with pytest.raises(InvalidRequest, match="/properties/a"):
        trial.llm.add_request(
            "bad", [1, 2], SamplingParams(guided=Guided(json={"properties": {"a": {"type": "frob"}}}))
        )
    assert not trial.llm.has_unfinished()


def test_the_fake_model_keeps_to_grammars_too() -> None:
    llm = LLM(load_fake(EngineConfig(num_kv_blocks=128)))
    for kind in KINDS:
        (output,) = llm.generate("prompt", SamplingParams(guided=Guided(**KINDS[kind]), seed=4, max_tokens=200))
        assert output.choices[0].finish_reason == "stop" and fits(kind, output.choices[0].text)


# ---- the matcher


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_matcher_asked_in_any_order_answers_as_a_new_one(tiny_tokenizer: Tokenizer, data: st.DataObject) -> None:
    compiler = GrammarCompiler(tiny_tokenizer, tiny_tokenizer.vocab_size)
    wanted = Guided(**KINDS[data.draw(st.sampled_from(sorted(KINDS)))])
    asked = compiler.compile(wanted)
    outputs: list[list[int]] = [[]]
    for _ in range(data.draw(st.integers(1, 12))):
        output = list(data.draw(st.sampled_from(outputs)))
        allowed = compiler.compile(wanted).allowed_after(output).nonzero()[0]
        if len(allowed) and data.draw(st.booleans()):
            output.append(int(data.draw(st.sampled_from(allowed.tolist()))))
        else:
            output.append(data.draw(st.integers(0, tiny_tokenizer.vocab_size - 1)))
        outputs.append(output)
        for each in (output, data.draw(st.sampled_from(outputs))):
            assert asked.allowed_after(each).tolist() == compiler.compile(wanted).allowed_after(each).tolist()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_greedy_draw_is_the_largest_that_is_allowed_and_asks_for_no_mask_where_that_is_the_largest(
    tiny_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Of one token the matcher is asked directly; it may deny an end that the mask then allows, never the reverse."""
    compiler = GrammarCompiler(tiny_tokenizer, tiny_tokenizer.vocab_size)
    matcher = compiler.compile(Guided(**KINDS[data.draw(st.sampled_from(sorted(KINDS)))]))
    sequence = new_sequence([5, 6], SamplingParams(temperature=0.0))
    sequence.matcher = matcher
    asked: list[int] = []
    mask_of = matcher.allowed_after

    def counted(token_ids: list[int]) -> Any:
        asked.append(len(token_ids))
        return mask_of(token_ids)

    for _ in range(data.draw(st.integers(1, 8))):
        output = sequence.output_token_ids
        allowed = mask_of(output).copy()
        if not allowed.any():
            return
        logits = torch.randn(len(allowed), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
        token_id = data.draw(st.sampled_from(allowed.nonzero()[0].tolist()))
        if data.draw(st.booleans()):
            logits[token_id] = 9.0
        asked.clear()
        matcher.allowed_after = counted  # type: ignore[method-assign]
        [sampled] = sample(logits[None], [Draw(0, sequence)])
        matcher.allowed_after = mask_of  # type: ignore[method-assign]
        largest = int(logits.argmax())
        assert sampled.token_id == int(logits.masked_fill(~torch.from_numpy(allowed), -torch.inf).argmax())
        if largest not in tiny_tokenizer.eos_token_ids:
            assert bool(asked) == (not allowed[largest])
        for each in data.draw(st.lists(st.integers(0, len(allowed) - 1), max_size=20)):
            assert matcher.may_follow(output, each) <= bool(allowed[each])
        output.append(token_id)


def test_one_token_is_judged_as_by_the_mask_however_a_text_could_be_cut(real_model: LoadedModel) -> None:
    """A mask has one cut of what is forced (`{"`), the grammar as such would know others (`{`)."""
    tokenizer, vocab_size = real_model.tokenizer, real_model.info.vocab_size
    compiler = GrammarCompiler(tokenizer, vocab_size)
    text = '{"name": "Ann", "ages": [1, 22, 1]}'
    written = tokenizer.encode(text, add_special_tokens=False)
    cuts = {text[start:end] for start in range(len(text)) for end in range(start + 1, len(text) + 1)}
    every = [each for each in range(vocab_size) if tokenizer.token_bytes(each).decode(errors="ignore") in cuts]
    assert len(every) > 60
    matcher, num_denied = compiler.compile(Guided(json=RECORD)), 0
    for place in range(len(written)):
        allowed = compiler.compile(Guided(json=RECORD)).allowed_after(written[:place])
        for token_id in [*every, *random.Random(place).sample(range(vocab_size), 200)]:
            assert matcher.may_follow(written[:place], token_id) == allowed[token_id]
            num_denied += matcher.num_allowed(written[:place], [token_id]) > allowed[token_id]
    assert num_denied  # what this is about


@pytest.mark.parametrize("kind", COUNTED)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_where_tokens_are_counted_the_answer_is_that_of_asking_at_every_place(
    tiny_tokenizer: Tokenizer, kind: str, data: st.DataObject
) -> None:
    """However the matcher comes to a place: back, in one piece, or step by step."""
    compiler = GrammarCompiler(tiny_tokenizer, tiny_tokenizer.vocab_size)
    steady, asked = (compiler.compile(Guided(grammar=COUNTED[kind])) for _ in range(2))
    assert not asked.can_go_back
    masks, output = [], list[int]()
    for _ in range(60):
        masks.append(steady.allowed_after(output).copy())
        allowed = masks[-1].nonzero()[0].tolist()
        if not allowed:
            break
        letters = [each for each in allowed if tiny_tokenizer.token_bytes(each).isalpha()]
        output.append(data.draw(st.sampled_from(letters if letters and data.draw(st.booleans()) else allowed)))
    for place in data.draw(st.lists(st.integers(0, len(masks) - 1), max_size=6)):
        wrong = data.draw(st.integers(0, tiny_tokenizer.vocab_size - 1))
        assert asked.may_follow(output[:place], wrong) <= (wrong in masks[place].nonzero()[0])
        assert asked.allowed_after(output[:place]).tolist() == masks[place].tolist()


@pytest.mark.parametrize("proposer", ["ngram", "self"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_where_tokens_are_counted_nothing_is_guessed_and_an_output_goes_on_as_it_was(
    exact_tiny: LoadedModel, tiny_folder: Path, temperature: float, proposer: str
) -> None:
    trial = Trial(exact_tiny, folder=tiny_folder, speculative=proposer, speculative_adaptive=False)
    for seed, (kind, grammar) in enumerate(COUNTED.items()):
        asked = {"guided": Guided(grammar=grammar), "ignore_eos": False, "max_tokens": 50, "temperature": temperature}
        trial.add(kind, prompt_of(9 + seed), seed=seed, **asked)
    trial.run()
    assert trial.llm.stats().num_drafted_tokens == 0
    assert {trial.output(kind).choices[0].finish_reason for kind in COUNTED} <= {"stop", "length"}
    trial.assert_all_as_alone()


def test_a_compiled_grammar_is_used_again(tiny_tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tiny_tokenizer, tiny_tokenizer.vocab_size)
    first, second = (compiler.compile(Guided(regex="a+")) for _ in range(2))
    assert first is not second
    assert len(compiler._compiled) == 1
    for index in range(100):
        compiler.compile(Guided(regex=f"a{{{index + 1}}}"))
    assert len(compiler._compiled) == 64


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(a?){500}a{500}"}, {"regex": "(a|aa|aaa|b)*c" + "(a|b)" * 40}, {"regex": r"(\w+\s?){1,500}"},
        {"grammar": "start: s\ns: s s | \"a\" | \"b\" | "},
        {"json": {"anyOf": [{"properties": {f"a{i}": {"type": ["string", "integer"]} for i in range(30)}}] * 30}},
    ],
)  # fmt: skip
def test_a_hostile_grammar_ends_its_choice_or_goes_on_and_neighbours_are_as_alone(
    exact_tiny: LoadedModel, asked: dict[str, Any]
) -> None:
    trial = Trial(exact_tiny)
    trial.add("hostile", prompt_of(9), guided=Guided(**asked), ignore_eos=False, max_tokens=60)
    trial.add("good", prompt_of(10), max_tokens=30)
    trial.run()
    del trial.asked["hostile"]
    trial.assert_all_as_alone()


# ---- the real model


def test_fifty_schemas_on_the_real_model_all_parse_and_validate(real_model: LoadedModel) -> None:
    assert len(SCHEMAS50) == 50
    llm = LLM(real_model, EngineConfig(num_kv_blocks=1024, max_num_seqs=64))
    template = llm.tokenizer.chat_template
    assert template is not None
    prompts, params = [], []
    for index, schema in enumerate(SCHEMAS50):
        asked = f"Answer with JSON of this schema, about a person or thing of your choice: {json.dumps(schema)}"
        text = template.render([{"role": "user", "content": asked}])
        prompts.append({"prompt_token_ids": llm.tokenizer.encode(text, add_special_tokens=False)})
        params.append(
            SamplingParams(
                guided=Guided(json=schema),
                temperature=random.Random(index).choice([0.0, 1.0]),
                seed=index,
                max_tokens=300,
            )
        )
    for schema, output in zip(SCHEMAS50, llm.generate(prompts, params), strict=True):
        choice = output.choices[0]
        assert choice.finish_reason == "stop", (schema, choice.text, choice.error)
        exact, whole = (json.loads(text, parse_float=Decimal) for text in (json.dumps(schema), choice.text))
        jsonschema.validate(whole, exact, format_checker=jsonschema.FormatChecker())
    llm.check_integrity()
