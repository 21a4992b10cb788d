"""What is asked for, as a grammar: what is refused, where the fault lies, and what the hostile cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.guided.grammar import check
from engine.params import MAX_GUIDED_BYTES, MAX_GUIDED_CHOICES, Guided, SamplingParams


def refusal_of(**asked: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check(Guided(**asked))
    return caught.value


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"type": "object"}},
        {"json": {}},
        {"json": '{"type": "array", "items": {"type": "integer"}}'},
        {"json": {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
        {"regex": r"[a-z]{1,10}@[a-z]+\.com"},
        {"choice": ["yes", 'a "quoted" one', "back\\slash", "zwei\nZeilen", "日本語", "/regex/", "|"]},
        {"grammar": 'start: "a" | "b" start'},
        {"grammar": 'root ::= "a" root | "b"'},
    ],
)
def test_what_compiles(asked: dict[str, Any]) -> None:
    check(Guided(**asked))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "strin"}, "at /:"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "at /properties/a:"),
        (
            {"type": "object", "properties": {"a/b~": {"type": "array", "items": {"not": {}}}}},
            "/properties/a~1b~0/items:",
        ),
        ({"anyOf": [{"type": "null"}, {"type": "array", "uniqueItems": True}]}, "at /anyOf/1:"),
        ({"$defs": {"x": {"type": "frob"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, "/$defs/x:"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "at /properties/a:"),
        ({"$ref": "https://example.com/schema.json"}, "at /:"),
        ({"type": "string", "pattern": "(a"}, "at /:"),
    ],
)
def test_a_schema_that_cannot_compile_names_the_place(schema: dict[str, Any], place: str) -> None:
    error = refusal_of(json=schema)
    assert error.param == "guided"
    assert place in error.message
    assert refusal_of(json=json.dumps(schema)).message == error.message


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"regex": "(a"}, "regex: "), ({"regex": "a(?=b)"}, "regex: "), ({"grammar": "start: missing"}, "grammar: "),
        ({"grammar": "root ::= missing ("}, "grammar: "), ({"json": "{"}, "is not JSON"),
        ({"json": "[1]"}, "no object"),
    ],
)  # fmt: skip
def test_other_faults_say_what_they_are(asked: dict[str, Any], what: str) -> None:
    assert what in refusal_of(**asked).message


@pytest.mark.parametrize(
    ("guided", "what"),
    [
        ({}, "sets nothing"), ({"json": {}, "regex": "a"}, "sets json, regex"), ({"choice": []}, "has 0 strings"),
        ({"choice": ["a", ""]}, "none of them empty"), ({"choice": ["a"] * (MAX_GUIDED_CHOICES + 1)}, "1025 strings"),
        ({"regex": ""}, "regex: is empty"), ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": "x" * (MAX_GUIDED_BYTES + 1)}, "shorten it"),
        ({"json": {"title": "x" * MAX_GUIDED_BYTES}}, "shorten"),
    ],
)  # fmt: skip
def test_parameters_refuse_what_needs_no_compiler(guided: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(guided=Guided(**guided)).validated()
    assert caught.value.param == "guided"
    assert what in caught.value.message


def test_an_output_without_an_end_cannot_be_guided() -> None:
    with pytest.raises(InvalidRequest, match="ends where its grammar does"):
        SamplingParams(guided=Guided(regex="a"), ignore_eos=True).validated()


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"anyOf": [{"properties": {f"a{i}": {"type": ["string", "integer"]} for i in range(30)}}] * 30}},
        {"json": {"allOf": [{"type": "object", "properties": {f"a{i}": {"type": "string"}}} for i in range(300)]}},
        {"json": json.loads('{"items":' * 400 + '{"type":"frob"}' + "}" * 400)},
        {"regex": "(((a{1,900}){1,900}){1,900}){1,900}"}, {"regex": "(a?){5000}a{5000}"},
        {"regex": r"\w{1,60000}" * 20},
        {"grammar": "start: " + " ".join('"a"?' for _ in range(5000))}, {"grammar": "start: " + "(" * 5000},
        {"grammar": "root ::= " + "(" * 5000},
    ],
)  # fmt: skip
def test_a_hostile_grammar_is_refused_or_taken_but_always_answered(asked: dict[str, Any]) -> None:
    """What it may cost per token is bounded by the limits; see test_guided.py."""
    try:
        check(Guided(**asked))
    except InvalidRequest as error:
        assert error.param == "guided"
        assert len(error.message) < 1000
