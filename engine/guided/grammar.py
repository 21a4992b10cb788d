"""What a caller asks for, as a grammar; refused where it is none, with the place. Needs no tokenizer.

json     a JSON schema; the output is written as `{"a": 1, "b": [2, 3]}`: blanks are not up to the model
regex    the whole output, in the syntax of Rust's regex crate
choice   one of the strings
grammar  Lark as llguidance reads it, or GBNF
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance import LLMatcher, LLParserLimits

from engine.errors import InvalidRequest
from engine.params import Guided

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# A step of the parser that would pass one of these ends its choice with an error instead. By llguidance's figures,
# 14,000 units of lexer fuel and 20,000 items take about 1 ms each, and a lexer state about 2 kB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,  # a caller's own words stay out of logs
)
_AS_WRITTEN: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_TRIED_PLACES = 60  # each is compiled
_MAX_PLACE_CHARACTERS = 200
_MAX_ERROR_CHARACTERS = 500


def grammar_of(guided: Guided) -> str:
    """The grammar in llguidance's form, compiled by nobody yet. Raises InvalidRequest where it has no such form."""
    if guided.json is not None:
        return _of_schema(_schema(guided.json))
    if guided.regex is not None:
        return str(LLMatcher.grammar_from_regex(guided.regex))
    if guided.choice is not None:
        strings = " | ".join(json.dumps(each, ensure_ascii=False) for each in guided.choice)
        return str(LLMatcher.grammar_from_lark(f"start: {strings}"))
    try:
        return str(llguidance.grammar_from("grammar", guided.grammar or ""))
    except ValueError as error:
        raise InvalidRequest("guided", f"grammar: {_short(str(error))}; send Lark or GBNF") from None


def check(guided: Guided) -> None:
    """Raises InvalidRequest, field `guided`, for what cannot be compiled. Takes up to about 100 ms; remembers."""
    error = _error_of(grammar_of(guided))
    if error is None:
        return
    if guided.json is None:
        kind = next(name for name in ("regex", "choice", "grammar") if getattr(guided, name) is not None)
        raise InvalidRequest("guided", f"{kind}: {error}; correct it")
    place, error = _place_of(_schema(guided.json), error)
    if len(place) > _MAX_PLACE_CHARACTERS:
        place = f"{place[:_MAX_PLACE_CHARACTERS]}..."
    raise InvalidRequest("guided", f"json: the schema at {place}: {error}; correct or remove that part")


@lru_cache(maxsize=256)
def _error_of(grammar: str) -> str | None:
    message = LLMatcher.validate_grammar(grammar, None, limits=LIMITS)
    return _short(message) if message and not message.startswith("WARNING") else None


def _short(message: str) -> str:
    """One line; the library draws the place of an error in a text under the text."""
    lines = [line.strip() for line in message.splitlines()]
    return " ".join(line for line in lines if line)[:_MAX_ERROR_CHARACTERS]


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = json.loads(given)
    except ValueError as error:
        raise InvalidRequest("guided", f"json: is not JSON: {error}; send a JSON schema") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("guided", "json: is no object; send a JSON schema")
    return schema


def _of_schema(schema: dict[str, Any]) -> str:
    return str(LLMatcher.grammar_from_json_schema(schema, defaults=_AS_WRITTEN))


def _place_of(schema: dict[str, Any], error: str) -> tuple[str, str]:
    """JSON pointer of the innermost part that cannot be compiled by itself, and what is wrong with it.

    The library names no place. A part is tried with the definitions of the whole, so that its references hold.
    """
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    place, part, num_tried = "", schema, 0
    while True:
        for name, inner in _parts_of(part):
            num_tried += 1
            if num_tried > _MAX_TRIED_PLACES:
                return place or "/", error
            inner_error = _error_of(_of_schema({**definitions, **inner}))
            if inner_error is not None:
                place, part, error = f"{place}/{name}", inner, inner_error
                break
        else:
            return place or "/", error


def _parts_of(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly inside this one, by where they are."""
    for name, value in schema.items():
        inner: list[tuple[str, Any]] = []
        if isinstance(value, dict) and name in ("properties", "patternProperties", "$defs", "definitions"):
            inner = [(f"{name}/{_escaped(key)}", part) for key, part in value.items()]
        elif isinstance(value, list) and name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            inner = [(f"{name}/{index}", part) for index, part in enumerate(value)]
        elif name in ("items", "additionalProperties"):
            inner = [(name, value)]
        yield from ((place, part) for place, part in inner if isinstance(part, dict))


def _escaped(key: str) -> str:
    """RFC 6901."""
    return key.replace("~", "~0").replace("/", "~1")
