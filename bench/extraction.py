"""Tasks whose answers repeat their prompts: extractive summaries and JSON from text, held to it by a grammar, and free.

extract        an extractive summary: one or two of the text's own sentences, whichever the model takes
json           a record of each of four lines, by a schema
verbatim       an extractive summary asked for in words alone, which the model follows: it copies
free summary   likewise, in words that it does not follow: it writes anew about half
free json      likewise; a small model copies the example as often as the text
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from bench.workload import CORPUS
from engine import SamplingParams
from engine.params import Guided

NUM_LINES = 4
LEAST_RUN = 4  # tokens; a shorter one may be the same by chance
FREE_TOKENS, GUIDED_TOKENS = 64, 160  # of an answer, at most; those that are guided end by themselves
# 23, 19 and 17 of them: two records never agree in all three.
_NAMES = (
    "Maria", "Ahmed", "Wei", "Olga", "Pedro", "Aiko", "John", "Fatima", "Lars", "Priya", "Tomas", "Leila",
    "Hugo", "Nadia", "Kofi", "Elena", "Ravi", "Ingrid", "Mateo", "Sofia", "Yusuf", "Clara", "Dmitri",
)  # fmt: skip
_CITIES = (
    "Lisbon", "Cairo", "Shanghai", "Kyiv", "Lima", "Osaka", "Leeds", "Rabat", "Bergen", "Pune", "Prague",
    "Shiraz", "Lyon", "Tunis", "Accra", "Turin", "Delhi", "Malmo", "Quito",
)  # fmt: skip
_TRADES = (
    "baker", "teacher", "sailor", "nurse", "painter", "farmer", "lawyer", "tailor", "pilot", "chemist", "mason",
    "singer", "cook", "porter", "clerk", "smith", "gardener",
)  # fmt: skip
_FIELDS: dict[str, Any] = {
    "name": {"type": "string"},
    "age": {"type": "integer"},
    "city": {"type": "string"},
    "job": {"type": "string"},
}
RECORDS: dict[str, Any] = {
    "type": "array",
    "minItems": NUM_LINES,
    "maxItems": NUM_LINES,
    "items": {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False},
}


class Ask(NamedTuple):
    message: str
    params: SamplingParams


def _paragraphs(count: int) -> list[str]:
    text = "\n".join(path.read_text() for path in sorted(CORPUS.glob("python-*.txt")))
    found = [each.replace("\n", " ") for each in text.split("\n\n") if 250 < len(each) < 900]
    return [found[index % len(found)] for index in range(count)]


def _summary_of(text: str) -> str:
    return f"Summarize the text by copying its most important sentences word for word.\n\nText: {text}"


def one_or_two_of(text: str) -> Guided:
    """One sentence of the text, or two."""
    sentences = [each.strip() for each in re.split(r"(?<=[.!?])\s+", text) if each.strip()]
    choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in sentences)
    return Guided(grammar=f'start: sentence (" " sentence)?\nsentence: {choices}\n')


def _lines_of(index: int) -> str:
    """Asks for JSON of what a few lines say."""
    lines = [
        f"{_NAMES[each % 23]} is {20 + (11 * each) % 50} years old, lives in "
        f"{_CITIES[(3 * each) % 19]} and works as a {_TRADES[(5 * each) % 17]}."
        for each in range(NUM_LINES * index, NUM_LINES * (index + 1))
    ]
    example = '[{"name": "Ann", "age": 41, "city": "Oslo", "job": "cook"}]'
    return f"Extract every person as JSON, in the form {example}\n\n" + "\n".join(lines) + "\n\nAnswer with JSON only."


def _params(guided: Guided | None = None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=FREE_TOKENS if guided is None else GUIDED_TOKENS, guided=guided)


def extracts(count: int) -> list[Ask]:
    return [Ask(_summary_of(text), _params(one_or_two_of(text))) for text in _paragraphs(count)]


def records(count: int) -> list[Ask]:
    return [Ask(_lines_of(index), _params(Guided(json=RECORDS))) for index in range(count)]


def free_summaries(count: int) -> list[Ask]:
    return [Ask(_summary_of(text), _params()) for text in _paragraphs(count)]


def share_copied(prompt: list[int], output: list[int]) -> float:
    """Of the output's tokens, those in runs of at least four that stand in the prompt."""
    runs = {tuple(prompt[place : place + LEAST_RUN]) for place in range(len(prompt) - LEAST_RUN + 1)}
    copied: set[int] = set()
    for place in range(len(output) - LEAST_RUN + 1):
        if tuple(output[place : place + LEAST_RUN]) in runs:
            copied.update(range(place, place + LEAST_RUN))
    return len(copied) / max(1, len(output))


def verbatim(count: int) -> list[Ask]:
    message = "Extract the key sentences from this text, verbatim:\n\n"
    return [Ask(message + text, _params()) for text in _paragraphs(count)]


def free_records(count: int) -> list[Ask]:
    return [Ask(_lines_of(index), _params()) for index in range(count)]


TASKS: dict[str, Callable[[int], list[Ask]]] = {
    "extract": extracts,
    "json": records,
    "verbatim": verbatim,
    "free summary": free_summaries,
    "free json": free_records,
}
