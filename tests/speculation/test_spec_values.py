"""Values that a grammar leaves free: how their words go on, how they end, and what that implies."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bench.extraction import records
from engine import LLM, EngineConfig
from engine.config import LoadedModel
from engine.guided.compiler import GrammarCompiler
from engine.guided.matcher import GrammarMatcher
from engine.params import Guided, SamplingParams
from engine.runner import TorchRunner
from engine.sequence import Request, Sequence
from engine.speculation.forced import ForcedFirst
from engine.speculation.ngram import NgramProposer
from engine.speculation.prompt_text import _MAX_BYTES, _MAX_WORD_BYTES
from engine.speculation.proposal import NOTHING, Grade, Proposal
from engine.speculation.values import (
    _MAX_ENDS,
    _MAX_FORCED_BYTES,
    _MAX_FORCED_TOKENS,
    _MAX_TOKENS_AT_ONCE,
    _MAX_VALUE_BYTES,
    _MAX_VALUES,
    ValueGuesser,
)

FIELDS: dict[str, Any] = {"name": {"type": "string"}, "age": {"type": "integer"}, "home": {"type": "string"}}
PEOPLE: dict[str, Any] = {
    "type": "array",
    "items": {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False},
}
PROMPT = (
    "Write JSON. Olga is 31 and lives in Rio; Lars Olsen is 58, lives in bergen-nord and not in Oslo. Ask o.k@mill.org!"
)
FIRST = '[{"name": "Olga", "age": 31, "home": "Rio"}'
NEXT = '}, {"name": "Ask", "age": '  # who stands behind a full stop, as Olga did; no age stands behind that


class Case:
    """A guesser before one output, which may be extended."""

    def __init__(self, loaded: LoadedModel, prompt: str = PROMPT, schema: dict[str, Any] = PEOPLE) -> None:
        self.loaded = loaded
        self.matcher: GrammarMatcher = GrammarCompiler(loaded.tokenizer, loaded.info.vocab_size).compile(
            Guided(json=schema)
        )
        request = Request("r", self.tokens(prompt), SamplingParams(), 0)
        request.sequences = [Sequence(request, 0, 0, [], matcher=self.matcher)]
        self.sequence, self.guesser = request.sequences[0], ValueGuesser()

    def tokens(self, text: str) -> list[int]:
        return self.loaded.tokenizer.encode(text, add_special_tokens=False)

    def write(self, text: str) -> None:
        for token_id in self.tokens(text):
            self.sequence.output_token_ids.append(token_id)

    def guess(self, count: int = 60) -> Proposal:
        self.guesser.follow(self.sequence, self.matcher)
        forced, num_certain = self.matcher.forced_after(self.sequence.output_token_ids, count)
        return self.guesser.guess(self.sequence, self.matcher, count, forced[:num_certain])

    def guessed(self, count: int = 60) -> str:
        return self.loaded.tokenizer.decode(self.guess(count).token_ids)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('[{"name": "O', "lga"),  # how strings end is not known yet
        ('[{"name": "Olga", "age": 3', "1"),  # and that they end by a comma and a quote is of no use here
        (FIRST + ', {"name": "L', 'ars Olsen", "age": 58, "home": "bergen-nord"' + NEXT),
        (FIRST + ', {"name": "Lars', ' Olsen", "age": 58, "home": "bergen-nord"' + NEXT),
        (FIRST + ', {"name": "Lars ', 'Olsen", "age": 58, "home": "bergen-nord"' + NEXT),
        (FIRST + ', {"name": "Lars", "age": 5', '8, "home": "bergen-nord"}, {"name": "'),
        (FIRST + ', {"name": "Lars", "age": 58, "home": "B', 'ergen-nord"}, {"name": "'),  # another case; a hyphen
        (FIRST + ', {"name": "Lars", "age": 58, "home": "O', 'slo"}, {"name": "'),  # behind the age, so not Olga
        (FIRST + ', {"name": "Lars", "age": 58, "home": "o.k', '@mill.org"}, {"name": "'),
        (FIRST + ', {"name": "Zoe', '", "age": 58, "home": "bergen-nord"' + NEXT),  # not in the prompt
        (FIRST + ', {"name": "rs', '", "age": 58, "home": "bergen-nord"' + NEXT),  # within a word is not at its start
        (FIRST + ', {"name": "', "Ask" + NEXT[NEXT.index('", "age') :]),  # behind a full stop, as Olga
        (FIRST + ', {"name": "Lars", "age": ', '58, "home": "bergen-nord"}, {"name": "'),
        (FIRST + ", ", '{"name": "Ask' + NEXT[NEXT.index('", "age') :]),
    ],
)  # fmt: skip
def test_a_word_goes_on_as_in_the_prompt_and_ends_as_values_did_before(
    tiny: LoadedModel, written: str, expected: str
) -> None:
    case = Case(tiny)
    for character in written:
        case.write(character)
        case.guess()
    assert case.guessed(200) == expected
    late = Case(tiny)  # asked once alone it has seen the same, where that was not too much
    late.write(written)
    if len(late.sequence.output_token_ids) < _MAX_TOKENS_AT_ONCE:
        assert late.guessed(200) == expected


def test_a_guess_is_graded_and_says_what_it_implies(real: LoadedModel) -> None:
    case = Case(real)
    case.write('[{"name": "Olga')
    assert case.guess() == NOTHING  # at a word's end, and how names end is not known
    case.write('", "age": 31, "home": "Rio"}, {"name": "L')
    guess = case.guess()
    assert real.tokenizer.decode(guess.token_ids) == 'ars Olsen", "age": 58, "home": "bergen-nord"' + NEXT
    graded = groupby(zip(guess.grades, guess.token_ids, strict=True), key=lambda pair: pair[0])
    pieces = [(grade and grade.source, real.tokenizer.decode([each for _, each in pairs])) for grade, pairs in graded]
    assert pieces == [
        ("value", 'ars Olsen",'), (None, ' "age": '), ("begins", "5"), ("goes on", "8"), ("ends", ","),
        (None, ' "home": "'), ("begins", "ber"), ("goes on", "gen-nord"), ("ends", '"},'),
        (None, ' {"name": "'), ("begins", "Ask"), ("ends", '",'), (None, ' "age": '),
    ]  # fmt: skip
    assert case.guess(1).token_ids == guess.token_ids[:1]
    case.write('isa", "age": 7, "home": "Y')
    assert case.guess().grades[0] == Grade("value", 1)


@example([{"name": "Olga", "age": 7, "home": "Rio"}] * 2, "-7 ", 200, 12)  # a word stands where an age would
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    people=st.lists(
        st.fixed_dictionaries(
            {"name": st.sampled_from(["Olga", "Lars", "Al", 'q"t', "日本", "\x00", ""]), "age": st.integers(-3, 120),
             "home": st.text(max_size=9)}
        ),
        max_size=3,
    ),
    prompt=st.text(max_size=80),
    cut=st.integers(0, 200),
    count=st.integers(0, 12),
)  # fmt: skip
def test_whatever_was_written_a_guess_is_short_enough_and_allowed(
    tiny: LoadedModel, people: list[dict[str, Any]], prompt: str, cut: int, count: int
) -> None:
    case = Case(tiny, prompt + PROMPT)
    written = case.tokens(json.dumps(people, ensure_ascii=False))[:cut]
    for place in range(len(written)):
        if not len(case.matcher.allowed_after(written[: place + 1])):
            return  # not as the grammar writes it
        case.sequence.output_token_ids.append(written[place])
        guess = case.guess(count)
        assert len(guess.token_ids) <= count
        assert case.matcher.num_allowed(written[: place + 1], guess.token_ids) == len(guess.token_ids)
        assert len(guess.grades) == len(guess.token_ids)
        assert guess.num_certain < max(1, len(guess.token_ids))  # what is certain alone is no guess


def test_an_output_that_is_continued_is_looked_at_from_its_end(tiny: LoadedModel) -> None:
    """Thousands of tokens of an earlier life are no reason to stop for all of them."""
    case = Case(tiny)
    case.write("[" + FIRST[1:] + (", " + FIRST[1:]) * 40 + ', {"name": "L')
    asked = []
    inner = case.matcher.forced_text_after
    case.matcher.forced_text_after = lambda token_ids: asked.append(len(token_ids)) or inner(token_ids)  # type: ignore
    assert case.guessed(200) == 'ars Olsen", "age": 58, "home": "bergen-nord"' + NEXT
    assert 0 < len(asked) <= _MAX_TOKENS_AT_ONCE


def test_a_burst_that_was_not_looked_at_ends_no_value(tiny: LoadedModel) -> None:
    note = "something that is always said, word by word, in each and every record of this kind, whoever it is about"
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "note": {"const": note}, "job": {"type": "string"}},
        "required": ["name", "note", "job"],
    }
    for chunk in (1, 90):
        case = Case(tiny, schema=schema)
        written = case.tokens(json.dumps({"name": "Olga", "note": note, "job": "cook"}))
        for place in range(0, len(written), chunk):
            case.sequence.output_token_ids += written[place : place + chunk]
            case.guess()
        [value] = case.guesser._values.values()
        ends = {name: tiny.tokenizer.decode(last.token_ids[:1]) for name, last in value._lasts.items()}
        assert ends == ({} if chunk == 90 else {b'name": "': '"'})  # the last value's end forces nothing more


def test_values_that_are_one_token_or_end_in_a_word_teach_no_end(tiny: LoadedModel) -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "string"}, "c": {"type": "string", "maxLength": 3}}
    record = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    case = Case(tiny, schema={"type": "array", "items": record})
    for character in '[{"a": "Olga", "b": "", "c": "abc"}, {"a": "L':
        case.write(character)
        case.guess()
    [value] = case.guesser._values.values()
    ends = {name: tiny.tokenizer.decode(last.token_ids) for name, last in value._lasts.items() if not last.is_empty}
    assert ends == {b'a": "': '", "b": "'}  # and not what came behind the b, which was none


def test_a_character_of_which_a_token_has_the_beginning_goes_on(tiny: LoadedModel) -> None:
    case = Case(tiny, "Die Größe ist bekannt.")
    written = case.tokens('[{"name": "Grö')
    case.sequence.output_token_ids += written[:-1]
    assert case.guess().token_ids == case.tokens("Größe")[3:]


def test_sequences_of_a_request_share_its_prompt(tiny: LoadedModel) -> None:
    case = Case(tiny)
    request = case.sequence.request
    request.sequences += [Sequence(request, choice, 0, [], matcher=case.matcher) for choice in (1, 2)]
    for sequence in request.sequences:
        case.guesser.follow(sequence, case.matcher)
    assert len({id(value.prompt) for value in case.guesser._values.values()}) == 1


def test_what_is_looked_up_is_bounded(tiny: LoadedModel) -> None:
    """Text without spaces is one word; a value may be as long as the output."""
    case = Case(tiny, "x" * 30_000 + " " + "見" * 3000)
    case.write('[{"name": "見')
    [value] = case.guesser._values.values() if case.guess() else []
    assert 9000 < len(value.prompt._text) <= _MAX_BYTES + 2
    assert case.guessed() in ("見" * 20, "見" * 21)  # of 64 bytes, whole characters
    case = Case(tiny, "x" * 5000)
    case.write('[{"name": "x')
    assert case.guessed(80) == "x" * _MAX_WORD_BYTES
    for _ in range(_MAX_VALUE_BYTES - 1):
        case.write("x")
        assert case.guess().token_ids
    case.write("x")
    assert case.guess() == NOTHING


def test_what_a_value_s_end_forces_is_found_once_for_each_value(tiny: LoadedModel) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}, "c": {"const": "long " * 200}},
        "required": ["a", "b", "c"],
    }
    case = Case(tiny, schema=schema)
    case.write('{"a": "Olga", "b": "')
    case.guess()
    asked = []
    inner = case.matcher.forced_after
    case.matcher.forced_after = lambda *given: asked.append(given[1]) or inner(*given)  # type: ignore
    for character in "Lars Olsen":
        case.write(character)
        assert case.guess(40).grades.count(None) > 20
    assert asked.count(_MAX_FORCED_TOKENS) == 1


def test_what_is_forced_is_cut_as_the_model_cut_it_before(tiny: LoadedModel) -> None:
    """Of a text's end it may go either way; here the model merged it with the value, so it is not promised."""
    [quote] = tiny.tokenizer.encode('"', add_special_tokens=False)
    case = Case(tiny)
    case.write(FIRST + ', {"name": "L')
    guess = case.guess(22)
    text = 'ars Olsen", "age": 58'
    assert tiny.tokenizer.decode(guess.token_ids).startswith(text)
    [value] = case.guesser._values.values()
    name, blank = value._lasts[b'name": "'], len(case.tokens('ars Olsen", "age":'))
    assert guess.grades[blank] is None
    name.token_ids.pop()  # as if the last blank had been part of the age's token
    guess = case.guess(22)
    assert tiny.tokenizer.decode(guess.token_ids).startswith(text)
    assert guess.grades[blank] == Grade("begins")
    value._lasts = {b'home": "': replace(name, token_ids=[quote, 1, 2, 3])}  # of another name: its end alone
    assert tiny.tokenizer.decode(case.guess().token_ids) == 'ars", "age": '


def test_what_is_remembered_is_bounded(tiny: LoadedModel) -> None:
    names = [f"field{number}" for number in range(_MAX_ENDS + 20)]
    fields: dict[str, Any] = {name: {"type": "string"} for name in names} | {"field3": {"const": "long " * 2000}}
    case = Case(tiny, schema={"type": "object", "properties": fields, "required": names})
    for name in names:
        text = fields[name].get("const", "x")
        case.write(("{" if name == names[0] else ", ") + f'"{name}": "{text[:50]}')
        case.guess()
        case.write(text[50:] + '"')
        [value] = case.guesser._values.values()
        if name == "field3":  # by now field2 has ended
            assert value._lasts[b'field2": "'].forced is None
    assert len(value._lasts) == _MAX_ENDS
    assert all(len(last.token_ids) <= _MAX_FORCED_TOKENS for last in value._lasts.values())
    assert all(last.forced is not None and len(last.forced) <= _MAX_FORCED_BYTES for last in value._lasts.values())


def test_however_many_tokens_may_be_guessed_few_values_are_looked_up(real: LoadedModel) -> None:
    """At 1000 at once, and a prompt of a thousand records: what is looked up and cut is bounded."""
    case = Case(real, "; ".join(f"N{number} is {number} and lives in R{number}" for number in range(1000)))
    people = [{"name": f"N{number}", "age": number, "home": f"R{number}"} for number in range(500, 503)]
    for token_id in case.tokens(json.dumps(people)[:-3]):  # up to the last value
        case.sequence.output_token_ids.append(token_id)
        case.guess()
    asked = []
    inner = case.matcher.tokens_of
    case.matcher.tokens_of = lambda text: asked.append(text) or inner(text)  # type: ignore
    assert len(case.guess(1000).token_ids) > 60
    assert len(asked) <= _MAX_VALUES + 2  # and those of the value that has begun, and of the test


def test_an_empty_string_is_a_value_and_not_what_stands_between_two(tiny: LoadedModel) -> None:
    """Where keys may be left out no name is known but the quotes before each value."""
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in "xyz"}}
    for value in ("", "red"):
        case = Case(tiny, "red tan elm", schema=schema)
        for character in f'{{"x": "{value}", "y": "':
            case.write(character)
            case.guess()
        assert not any(last.is_empty for last in next(iter(case.guesser._values.values()))._lasts.values())


def test_a_token_that_is_forced_in_part_teaches_no_end(real: LoadedModel) -> None:
    """Behind `true` a brace is forced, and the model writes it with the comma that follows, which is not."""
    fields = {"name": {"type": "string"}, "is_here": {"type": "boolean"}}
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    case = Case(real, "Olga is here. Lars is here. Wei is here.", schema={"type": "array", "items": item})
    assert len(case.tokens("},")) == 1
    for token_id in case.tokens(
        '[{"name": "Olga", "is_here": true}, {"name": "Lars", "is_here": true}, {"name": "Wei"'
    ):
        case.sequence.output_token_ids.append(token_id)
        case.guess()
    [value] = case.guesser._values.values()
    assert not any(real.tokenizer.decode(last.token_ids[:1]).startswith("}") for last in value._lasts.values())


def test_where_a_field_stood_is_known_though_its_last_value_was_made_up(tiny: LoadedModel) -> None:
    case = Case(tiny, "Olga is 31. Lars is 58. Wei is 20.", schema=PEOPLE)
    made_up = FIRST.replace("Rio", "-") + ', {"name": "Lars", "age": 99, "home": "-"}, {"name": "Wei'
    for character in made_up:
        case.write(character)
        case.guess()
    assert case.guessed(200).startswith('", "age": 20, ')


def test_a_proposer_offers_what_it_looks_up_and_what_the_value_may_be(tiny: LoadedModel) -> None:
    case = Case(tiny)
    proposer = ForcedFirst(NgramProposer())
    case.write(FIRST + ", ")
    forced, value = proposer.propose(case.sequence, 60)
    assert forced.num_certain > 0 and value.token_ids[: forced.num_certain] == forced.token_ids[: forced.num_certain]
    assert tiny.tokenizer.decode(value.token_ids) == '{"name": "Ask", "age": '
    case.write('{"name": "L')
    text, value = proposer.propose(case.sequence, 40)
    assert tiny.tokenizer.decode(value.token_ids).startswith('ars Olsen", "age": 58, "home": "')
    assert text.grades[0] == Grade("text", 1) and tiny.tokenizer.decode(text.token_ids).startswith("ars Olsen is 58")


def test_records_of_the_prompt_are_written_in_few_steps(real: LoadedModel) -> None:
    """Of what the real model writes from one text; without this guesser each step gives 3.9 tokens."""
    asks = records(3)
    template = real.tokenizer.chat_template
    assert template is not None and isinstance(real.runner, TorchRunner)
    outputs = []
    for proposer in ("none", "ngram"):
        config = EngineConfig(speculative=proposer, speculative_adaptive=False, num_kv_blocks=64)
        runner = TorchRunner(real.runner.decoder, 1024, config.block_size, 64, 0, real.runner._kv.layer(0)[0].dtype)
        llm = LLM(LoadedModel(runner=runner, tokenizer=real.tokenizer, info=real.info), config)
        prompts = [template.render([{"role": "user", "content": each.message}]) for each in asks]
        told = [llm.generate(prompt, each.params)[0] for prompt, each in zip(prompts, asks, strict=True)]
        outputs.append([each.choices[0].token_ids for each in told])
    assert outputs[0] == outputs[1]
    assert sum(len(token_ids) for token_ids in outputs[1]) > 4.3 * llm.stats().num_steps
