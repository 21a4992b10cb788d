"""vLLM #3574; TGI #1039, #1254: a stop string that starts and ends inside tokens leaks, or takes too much with it.

Kind: text borders that are no token borders. Siblings: stops inside one token, over several, over the last token by
length; stops that overlap, contain one another, begin in the prompt, begin before min_tokens; n > 1; included stops;
held back text that never became a stop; streams against whole answers; preempted half-way through a stop.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.config import LoadedModel
from tests.cases.scripted_model import writing
from tests.cases.trial import Trial, prompt_of


def wordy(loaded: LoadedModel) -> dict[int, float]:
    """Biases that make a random model write the tokenizer's longer tokens, and some letters between them."""
    whole = {token_id: loaded.tokenizer.token_bytes(token_id) for token_id in range(3, 273)}
    longer = [token_id for token_id, data in whole.items() if len(data) > 1 and data.isascii()]
    letters = [token_id for token_id, data in whole.items() if data in (b"a", b"e", b"s", b" ")]
    assert len(longer) > 8
    return dict.fromkeys([*longer, *letters], 30.0)


def cut_at(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text before the stop that is complete first, and the longest stop that is complete there."""
    ends = {text.index(stop) + len(stop): stop for stop in sorted(stops, key=len) if stop in text}
    if not ends:
        return text, None
    stop = ends[min(ends)]
    return text[: min(ends) - len(stop)], stop


@pytest.mark.parametrize("seed", range(4))
def test_any_part_of_the_text_may_be_a_stop(trial: Callable[..., Trial], tiny: LoadedModel, seed: int) -> None:
    """Every substring of what would be written, among company and in a small pool: cut right before it, every time."""
    rng = random.Random(seed)
    params: dict[str, Any] = {"max_tokens": 24, "logit_bias": wordy(tiny), "seed": seed, "n": 2}
    free = trial().ask(prompt_of(9), **params).choices
    engine = trial(num_kv_blocks=10, num_host_slots=rng.choice([0, 20]), preemption_mode="swap", max_num_seqs=4)
    listed = []
    for index in range(8):
        text = rng.choice(free).text
        start = rng.randrange(len(text) - 1)
        stops = [text[start : start + rng.randint(1, 9)]]
        if index % 2:
            stops += [text[start + 1 : start + 4] or "x", "never", stops[0] + "#"]
        listed.append(stops)
        include = index % 3 == 0
        engine.add(f"r{index}", prompt_of(9), **params, stop=stops, include_stop_str_in_output=include)
    engine.run()
    for index, stops in enumerate(listed):
        for choice, whole in zip(engine.output(f"r{index}").choices, free, strict=True):
            text, stop = cut_at(whole.text, stops)
            assert choice.stop_reason == stop and choice.finish_reason == ("stop" if stop else "length")
            assert choice.text == text + (stop or "" if index % 3 == 0 else "")
            assert whole.token_ids[: len(choice.token_ids)] == choice.token_ids
            tokens = engine.loaded.tokenizer.decode(choice.token_ids[:-1])
            assert stop is None or cut_at(tokens, stops)[1] is None, "it went on behind the stop"
    engine.assert_all_as_alone()


@given(
    script=st.text("ab ", min_size=1, max_size=12),
    stops=st.lists(st.text("ab ", min_size=1, max_size=6), min_size=1, max_size=4),
    min_tokens=st.sampled_from([0, 0, 3]),
    max_tokens=st.integers(3, 30),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_text_of_two_letters_and_every_kind_of_overlap(
    script: str, stops: list[str], min_tokens: int, max_tokens: int
) -> None:
    """One byte a token, so that the right answer is plain text arithmetic; streamed and whole."""
    text = (script * max_tokens)[:max_tokens]
    expected, stop = cut_at(text[min_tokens:], stops)
    expected = text[:min_tokens] + expected
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop=stops)
    [output] = _engine(script).generate("prompt ab", params)
    (choice,) = output.choices
    assert (choice.text, choice.stop_reason) == (expected, stop)
    llm = _engine(script)
    llm.add_request("r", "prompt ab", params)
    said = ""
    while llm.has_unfinished():
        for delta in llm.step():
            said += delta.deltas[0].text
            assert expected.startswith(said), "what was said is taken back"
    assert said == expected


def _engine(script: str) -> LLM:
    """One engine for all examples: making one takes longer than an answer."""
    if not _engines:
        _engines.append(writing("x", num_kv_blocks=64))
    _engines[0]._executor._runner.script = script.encode()  # type: ignore[attr-defined]
    _engines[0].drop_prefix_cache()
    return _engines[0]


_engines: list[LLM] = []


def test_the_prompt_is_no_part_of_a_stop() -> None:
    [output] = writing("nd.").generate("to the e", SamplingParams(max_tokens=3, stop=["end", " the end"]))
    assert output.choices[0].text == "nd."


def test_a_stop_over_the_last_token_outweighs_the_length(trial: Callable[..., Trial], tiny: LoadedModel) -> None:
    """Over every length at which the last two characters are new: there are such ones, and each ends by the stop."""
    engine = trial()
    num_tried = 0
    for max_tokens in range(2, 14):
        free = engine.ask(prompt_of(9), max_tokens=max_tokens, logit_bias=wordy(tiny)).choices[0]
        stop = free.text[-2:]
        if free.text.index(stop) + len(stop) == len(free.text):
            num_tried += 1
            choice = engine.ask(prompt_of(9), max_tokens=max_tokens, logit_bias=wordy(tiny), stop=[stop]).choices[0]
            assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", stop, free.text[:-2])
            assert choice.token_ids == free.token_ids
    assert num_tried >= 2
    engine.assert_all_as_alone()


@pytest.mark.real_model
def test_on_the_real_model(real: LoadedModel) -> None:
    engine = Trial(real, block_size=16, num_kv_blocks=64)
    free = engine.ask("Write a list of three fruits:", temperature=0.0, max_tokens=16).choices[0]
    middle = len(free.text) // 2
    stop = free.text[middle - 2 : middle + 3]
    choice = engine.ask("Write a list of three fruits:", temperature=0.0, max_tokens=16, stop=[stop]).choices[0]
    assert choice.text == free.text[: free.text.index(stop)] and choice.stop_reason == stop


@pytest.mark.parametrize("stop", ["\ufffd", "b\ufffd", "never"])
def test_a_stop_in_the_tail_ends_it_alike_when_it_is_told_again(stop: str) -> None:
    """The last token is half a character, told as U+FFFD at the end: emitted before or not, it ends in the same way."""
    params = SamplingParams(max_tokens=3, stop=[stop])
    [output] = writing(b"ab\xf0").generate("x", params)
    whole = output.choices[0]
    assert (whole.text, whole.stop_reason) == {"\ufffd": ("ab", stop), "b\ufffd": ("a", stop)}.get(
        stop, ("ab\ufffd", None)
    )
    for num_emitted in range(4):
        llm = writing(b"ab\xf0")
        llm.add_request("r", "x", params, emitted=[whole.token_ids[:num_emitted]])
        told = [each for _ in range(4) for delta in llm.step() for each in delta.deltas]
        assert (told[-1].finish_reason, told[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
        assert whole.text.endswith("".join(each.text for each in told))


async def test_over_http_both_ways(service: Callable[..., Any]) -> None:
    served = await service(lambda: writing("Hello, world. ", num_kv_blocks=64))
    for stop, text in ((["o, w"], "Hell"), (["wor", "world"], "Hello, "), (["lo, x"], "Hello, world. Hello,"),
                       ("H", ""), (["d. Hel"], "Hello, worl"), (["😀"], "Hello, world. Hello,")):  # fmt: skip
        body = {"prompt": "x", "max_tokens": 20, "stop": stop}
        _, answer = await served.post("completions", body)
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == ("length" if len(text) == 20 else "stop")
        chunks = await served.chunks("completions", body)
        assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "stop": stop}
        chunks = await served.chunks("chat/completions", chat)
        assert "".join(choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]) == text


def test_no_more_is_held_back_than_may_become_a_stop() -> None:
    """A stop that is always half there holds back its own length at most."""
    engine = writing("a", num_kv_blocks=64)
    engine.add_request("r", "x", SamplingParams(max_tokens=100, stop=["a" * 30 + "b"]))
    said = num_steps = 0
    while engine.has_unfinished():
        for delta in engine.step():
            num_steps += 1
            said += len(delta.deltas[0].text)
            assert said >= min(num_steps, 100) - 30
    assert said == 100
