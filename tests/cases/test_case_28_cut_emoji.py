"""ds4 PR #815: an emoji that max_tokens cuts makes a stream that is no UTF-8, or differs from the blocking answer.

Kind: an answer that ends inside a character. Siblings: every cut of characters of 2 to 4 bytes and of joined ones,
ends by stop token, stop string, abort and length; logprobs of tokens that are parts; both routes, both modes, the
job's record and its event log.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine import SamplingParams
from tests.cases.scripted_model import writing
from tests.cases.service import MODEL, Service, strict_json

SCRIPT = "é😀漢👩‍👧"
BYTES = SCRIPT.encode()


def expected_text(num_tokens: int) -> str:
    """Whole characters, and one U+FFFD where the last is not whole."""
    data = (BYTES * 2)[:num_tokens]
    whole = data.decode(errors="ignore")
    return whole + "\ufffd" * (whole.encode() != data)


@pytest.mark.parametrize("max_tokens", range(1, len(BYTES) + 2))
def test_every_cut_is_replaced_once(max_tokens: int) -> None:
    [output] = writing(SCRIPT).generate("x", SamplingParams(max_tokens=max_tokens))
    assert output.choices[0].text == expected_text(max_tokens)


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_a_stop_token_or_an_abort_inside_a_character_ends_it_the_same(num_tokens: int) -> None:
    """The stop token is no text; what stood before it is, as far as it is whole."""
    llm = writing(BYTES[:num_tokens] + b"!")
    [output] = llm.generate("x", SamplingParams(max_tokens=50, stop_token_ids=[ord("!")]))
    assert output.choices[0].text == expected_text(num_tokens)
    assert output.choices[0].finish_reason == "stop"
    llm = writing(SCRIPT)
    llm.add_request("r", "x", SamplingParams(max_tokens=50))
    texts = [each.text for _ in range(num_tokens) for delta in llm.step() for each in delta.deltas]
    last = llm.abort("r")
    assert last is not None
    assert "".join(texts) + last.deltas[0].text == expected_text(num_tokens)


@pytest.mark.parametrize("stop", ["😀", "\ufffd", "漢👩", "\u200d"])
def test_stop_strings_of_such_characters(stop: str) -> None:
    [output] = writing(SCRIPT).generate("x", SamplingParams(max_tokens=len(BYTES), stop=[stop]))
    (choice,) = output.choices
    if stop in SCRIPT:
        assert (choice.text, choice.stop_reason) == (SCRIPT[: SCRIPT.index(stop)], stop)
    else:
        assert (choice.text, choice.stop_reason) == (SCRIPT, None)


async def answers(served: Service, max_tokens: int) -> list[str]:
    """The text of one answer by every way there is."""
    ask: dict[str, Any] = {"prompt": "x", "max_tokens": max_tokens, "logprobs": 2}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens, "logprobs": True,
                            "top_logprobs": 2}  # fmt: skip
    _, whole = await served.post("completions", ask)
    texts = [whole["choices"][0]["text"]]
    chunks = await served.chunks("completions", ask)
    texts.append("".join(choice["text"] for chunk in chunks for choice in chunk["choices"]))
    _, whole = await served.post("chat/completions", chat)
    texts.append(whole["choices"][0]["message"]["content"])
    parts = [one["bytes"] for one in whole["choices"][0]["logprobs"]["content"]]
    assert len(parts) == max_tokens
    chunks = await served.chunks("chat/completions", chat)
    texts.append("".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]))
    job = await served.client.post(
        "/v1/jobs",
        json={"model": MODEL, "input": "x", "params": {"max_tokens": max_tokens}},
        headers={"prefer": "wait=20"},
    )
    record = strict_json(job.content)
    texts.append(record["result"]["choices"][0]["text"])
    log = await served.client.get(f"/v1/jobs/{record['id']}/events")
    events = [json.loads(line[6:]) for line in log.content.decode("utf-8").splitlines() if line.startswith("data: ")]
    texts.append("".join(delta.get("text", "") for event in events for delta in event.get("deltas", [])))
    return texts


async def test_all_ways_agree_over_http(service: Callable[..., Any]) -> None:
    served = await service(lambda: writing(SCRIPT))
    for max_tokens in (1, 2, 3, 4, 5, 6, 8, 11, len(BYTES)):
        assert await answers(served, max_tokens) == [expected_text(max_tokens)] * 6
