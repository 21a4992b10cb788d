"""What stood around a value in a prompt finds the next one of its kind."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import LoadedModel
from engine.guided.compiler import GrammarCompiler
from engine.params import Guided, SamplingParams
from engine.sequence import Request, Sequence
from engine.speculation.forced import ForcedFirst
from engine.speculation.ngram import NgramProposer
from engine.speculation.prompt_text import _MAX_WORD_BYTES, PromptText, Span

PEOPLE = [
    {"name": "Olga", "age": 31, "home": "Rio"},
    {"name": "Lars Olsen", "age": 58, "home": "Bergen-Nord"},
    {"name": "Ng", "age": 7, "home": "Hồ Chí Minh"},
    {"name": "Maria", "age": 40, "home": "Lima"},
]
FORMS = {
    "prose": ("{name} is {age} years old and lives in {home}.", " "),
    "lines": ("- {name} ({age}), {home}", "\n"),
    "comma separated": ("{name},{age},{home}", "\n"),
    "tab separated": ("{name}\t{age}\t{home}", "\n"),
    "table": ("| {name} | {age} | {home} |", "\n"),
    "JSON": ('{{"who": "{name}", "years": {age}, "town": "{home}"}}', ",\n"),
    "XML": ("<p><n>{name}</n><a>{age}</a><h>{home}</h></p>", "\n"),
    "form": ("Name: {name}\nAge: {age}\nHome: {home}\n", "\n"),
}


def found(text: PromptText, span: Span | None) -> str | None:
    return None if span is None else text.text_of(span.begin, span.end).decode()


@pytest.mark.parametrize("form", FORMS)
def test_each_field_of_a_record_stands_as_that_of_the_last_record_did(form: str) -> None:
    record, between = FORMS[form]
    text = PromptText(f"Who lives where.{between}{between.join(record.format(**each) for each in PEOPLE)}".encode())
    place = 0
    last: dict[str, Span] = {}
    for person in PEOPLE:
        for name, value in person.items():
            if name in last:
                assert found(text, text.next_like(last[name], place)) == str(value), (form, name)
            span = text.find(str(value).encode(), place)
            assert span is not None
            last[name], place = span._replace(behind=place), span.end


def test_where_nothing_stands_like_the_last_value_nothing_is_found() -> None:
    text = PromptText(b"Ann said: red. Bob said blue. Eve said: green")
    red, green = text.find(b"red", 0), text.find(b"green", 0)
    assert red is not None and green is not None
    assert found(text, text.next_like(red, red.end)) == "green"
    assert text.next_like(green, green.end) is None
    ann, said = text.find(b"ann", 0), text.find(b"said", 0)
    assert ann is not None and said is not None
    assert text.next_like(ann, ann.end) is None  # nothing stands before the first word
    assert text.next_like(said, said.end) is None  # a blank alone tells nothing, and nobody is called Ann again


def test_a_value_goes_on_to_what_stood_behind_the_last_one_over_blanks_alone() -> None:
    text = PromptText(b"for Ann Lee now; for Bob now; for Eve, who is at work now")
    ann = text.find(b"Ann Lee", 0)
    assert ann is not None
    bob = text.next_like(ann, ann.end)
    assert bob is not None and found(text, bob) == "Bob"
    assert found(text, text.next_like(ann, bob.end)) == "Eve"  # not "Eve, who is at work"


@pytest.mark.parametrize("form", ["{},{},{}\n", "| {} | {} | {} |\n", "{}: {}; {}.\n"])
def test_the_value_before_is_no_surrounding(form: str) -> None:
    """Another row has another there; what is equal by chance stands in the wrong row."""
    rows = [("Ann", "ok", "Rome"), ("Bob", "bad", "Oslo"), ("Cy", "ok", "Bern")]
    text = PromptText(("name,status,city\n" + "".join(form.format(*row) for row in rows)).encode())
    ok = text.find_whole(b"ok", 0)
    assert ok is not None
    rome = text.find_whole(b"Rome", ok.end)
    bad = text.find_whole(b"bad", ok.end)
    assert rome is not None and bad is not None
    assert found(text, text.next_like(rome._replace(behind=ok.end), bad.end)) == "Oslo"
    assert found(text, text.next_like(rome, bad.end)) == "Bern"  # where it is not known


def test_a_whole_value_is_no_beginning_of_a_longer_word() -> None:
    text = PromptText(b"Anna is 70, Ann is 7, ann-marie is 7x")
    assert text.find(b"Ann", 0) == text.find(b"Anna", 0)._replace(end=4)  # type: ignore[union-attr]
    for value, place in ((b"Ann", 15), (b"7", 24)):
        span = text.find_whole(value, 0)
        assert span is not None and text.text_of(0, span.begin).count(b" ") == {15: 3, 24: 5}[place]
    assert text.find_whole(b"An", 0) is None


@given(st.binary(max_size=300), st.binary(max_size=20), st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_whatever_the_text_spans_lie_within_it(raw: bytes, beginning: bytes, start: int, begin: int, more: int) -> None:
    text = PromptText(raw)
    length = len(text._text)
    last = Span(min(begin, length), min(begin + more, length))
    for span in (text.find(beginning, start), text.next_like(last, start)):
        if span is not None:
            assert 0 <= span.begin <= span.end <= length
    end = text.end_like(last, min(start, length))
    assert min(start, length) <= end <= min(start + _MAX_WORD_BYTES, length)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_bounded", [True, False])
def test_records_that_are_as_the_prompt_has_them_take_few_steps_from_the_second_on(
    real: LoadedModel, form: str, is_bounded: bool
) -> None:
    """However the prompt writes them."""
    fields: dict[str, Any] = {"name": {"type": "string"}, "age": {"type": "integer"}, "home": {"type": "string"}}
    schema: dict[str, Any] = {
        "type": "array",
        "items": {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False},
    }
    if is_bounded:
        schema |= {"minItems": 4, "maxItems": 4}
    record, between = FORMS[form]
    tokenizer = real.tokenizer
    prompt = f"Write the people as JSON.{between}" + between.join(record.format(**each) for each in PEOPLE)
    output = tokenizer.encode(json.dumps(PEOPLE, ensure_ascii=False), add_special_tokens=False)
    request = Request("r", tokenizer.encode(prompt, add_special_tokens=False), SamplingParams(), 0)
    matcher = GrammarCompiler(tokenizer, real.info.vocab_size).compile(Guided(json=schema))
    sequence = Sequence(request, 0, 0, [], matcher=matcher)
    request.sequences = [sequence]
    proposer = ForcedFirst(NgramProposer())
    steps: dict[int, int] = {}
    while (place := len(sequence.output_token_ids)) < len(output):
        guesses = proposer.propose(sequence, 10)
        right = max(_num_right(each.token_ids, output[place:]) for each in guesses)
        sequence.output_token_ids += output[place : place + right + 1]
        number = tokenizer.decode(output[:place]).count("{")
        steps[number] = steps.get(number, 0) + 1
    assert sum(count for number, count in steps.items() if number >= 2) <= 8  # 72 tokens; 10 to 13 without


def _num_right(guessed: list[int], came: list[int]) -> int:
    count = 0
    while count < min(len(guessed), len(came)) and guessed[count] == came[count]:
        count += 1
    return count
