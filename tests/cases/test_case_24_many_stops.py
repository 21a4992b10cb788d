"""ember #22; text-generation-inference PR #1625: thousands of stop strings, or one of a megabyte, stall everybody.

Kind: work that grows with what a caller lists. Siblings: bad words, stop ids, biases, choices, each refused beyond a
bound and cheap at it; stops that share beginnings, that overlap themselves, that are never finished; what is kept of
them after the request.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, EngineConfig, InvalidRequest, SamplingParams
from engine.params import MAX_LOGIT_BIASES, MAX_STOP_BYTES, MAX_STOPS
from engine.text import stops
from engine.text.stops import StopStrings
from tests.cases.trial import Trial, prompt_of

TOO_MUCH: list[tuple[str, Any]] = [
    ("stop", [f"stop {index}" for index in range(5000)]),
    ("stop", ["x" * (1 << 20)]),
    ("stop", ["ok", "é" * (MAX_STOP_BYTES // 2 + 1)]),
    ("stop", ["x"] * (MAX_STOPS + 1)),
    ("bad_words", [f"word {index}" for index in range(5000)]),
    ("bad_words", ["x" * (1 << 20)]),
    ("stop_token_ids", list(range(200)) * 25),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)),
    ("n", 129),
    ("n", 2**40),
]


@pytest.mark.parametrize(("field", "value"), TOO_MUCH)
def test_beyond_the_bounds_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LLM("fake").generate("x", SamplingParams(**{field: value}))
    assert caught.value.param == field and len(str(caught.value)) < 300


def worst_stops(seed: int = 0) -> list[str]:
    """As many and as long as they may be, all beginning alike, none ever finished by the tiny model."""
    rng = random.Random(seed)
    return ["a" * 500 + "".join(rng.choices("ab", k=MAX_STOP_BYTES - 501)) + "#" for _ in range(MAX_STOPS)]


def test_at_the_bounds_every_character_is_looked_at_about_once() -> None:
    """Two looks per character at most on the whole, however the stops overlap with themselves and the text."""

    class Counting(StopStrings):
        num_looks = 0

        def advance(self, node: int, character: str) -> int:
            while node and character not in self.children[node]:
                node = self._fallback[node]
                self.num_looks += 1
            self.num_looks += 1
            return self.children[node].get(character, 0)

    for listed in (worst_stops(), ["a" * count for count in range(200, 264)], ["ab" * 400 + "c"]):
        automaton = Counting(listed)
        automaton.num_looks = 0
        text = "a" * 199 + "b" + "ab" * 3000
        automaton.scan(0, text)
        assert automaton.num_looks <= 2 * len(text)


def test_at_the_bounds_the_tokens_are_the_same_and_the_neighbours_are_too(trial: Callable[..., Trial]) -> None:
    engine = trial()
    free = engine.ask(prompt_of(9), max_tokens=30, n=4)
    engine.add("neighbour", prompt_of(9, seed=1), max_tokens=30)
    engine.add("r", prompt_of(9), max_tokens=30, n=4, stop=worst_stops(), bad_words=worst_stops(1)[:1])
    engine.run()
    assert engine.output("r").choices == free.choices
    engine.assert_all_as_alone()


def test_nothing_is_kept_of_stops_that_nobody_uses() -> None:
    """An automaton of the longest stops takes 20 MB: while requests use it they share it, then it goes."""
    llm = LLM("fake", EngineConfig(num_kv_blocks=64))
    gc.collect()
    before = len(stops._in_use)
    for seed in range(3):
        params = SamplingParams(max_tokens=4, n=3, stop=worst_stops(seed))
        for name in ("one", "other"):
            llm.add_request(f"{seed} {name}", "x", params)
        assert len(stops._in_use) == before + 1
        while llm.has_unfinished():
            llm.step()
        assert len(stops._in_use) == before


async def test_over_http_refused_at_once_and_health_answers(service: Callable[..., Any]) -> None:
    served = await service(lambda: LLM("fake", EngineConfig(num_kv_blocks=256)))
    for field, value in TOO_MUCH:
        sent = {str(token): bias for token, bias in value.items()} if field == "logit_bias" else value
        status, answer = await served.post("completions", {"prompt": "x", "max_tokens": 2, field: sent})
        assert status == 400 and answer["error"]["param"].startswith(field), answer
        status, answer = await served.post("jobs", {"input": "x", "params": {field: sent}})
        assert status == 400 and answer["error"]["param"].startswith(f"params.{field}"), answer
    status, plain = await served.post("completions", {"prompt": "x", "max_tokens": 9, "seed": 1})
    status, answer = await served.post(
        "completions", {"prompt": "x", "max_tokens": 9, "seed": 1, "stop": worst_stops()}
    )
    assert status == 200 and answer["choices"] == plain["choices"]
    await served.assert_healthy()
