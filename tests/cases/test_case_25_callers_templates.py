"""vLLM #52025, PR #50300: a caller's chat template with nested loops keeps the server busy for ever.

Kind: a caller's text that is run as code. Siblings: every field that could carry a template or its variables,
templates inside messages, roles and names, very many and very long messages through the model's own template.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from engine import LLM, EngineConfig
from tests.cases.service import MODEL

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
USER = {"role": "user", "content": "x"}


def fake() -> LLM:
    return LLM("fake", EngineConfig(num_kv_blocks=512))


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template": LOOPS},
        {"chat_template": None, "chat_template_kwargs": {"loops": LOOPS}},
        {"chat_template_kwargs": {}},
        {"documents": [{"text": "x"}]},
        {"tools": [{"type": "function", "function": {"name": LOOPS}}]},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"tokenizer": "other/model"},
    ],
)
async def test_what_could_carry_a_template_is_refused(service: Callable[..., Any], extra: dict[str, Any]) -> None:
    served = await service(fake)
    status, answer = await served.post("chat/completions", {"messages": [USER], "max_tokens": 1, **extra})
    assert status == 400 and answer["error"]["param"] in extra, answer
    await served.assert_healthy()


async def test_text_is_never_run(service: Callable[..., Any]) -> None:
    """The prompt has as many tokens as its text has bytes: nothing was expanded, on any route."""
    served = await service(fake)
    for text in (LOOPS, "{{ 7 * 7 }}", "{% raw %}", "{{ messages }}", "{# note #}", "{% endfor %}"):
        status, answer = await served.post(
            "chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        )
        assert status == 200 and answer["usage"]["prompt_tokens"] == len(text) + 3
        status, answer = await served.post("completions", {"prompt": text, "max_tokens": 1})
        assert status == 200 and answer["usage"]["prompt_tokens"] == len(text)
        status, answer = await served.post("chat/completions", {"messages": [{"role": text, "content": "x"}]})
        assert status == 400 and answer["error"]["param"] == "messages[0].role"


@pytest.mark.parametrize(
    ("messages", "least_answers"),
    [([USER] * 20_000, 4), ([{"role": "user", "content": "y" * 2_000_000}], 20)],
    ids=["many", "long"],
)
async def test_a_mountain_of_messages_keeps_nobody_waiting(
    service: Callable[..., Any], messages: list[dict[str, str]], least_answers: int
) -> None:
    """It is refused for its length, and the gateway answers others while it counts."""
    served = await service(fake)
    body = json.dumps({"model": MODEL, "messages": messages, "max_tokens": 1}).encode()
    task = asyncio.create_task(served.post("chat/completions", body))
    num_answers = 0
    while not task.done():
        assert (await served.client.get("/healthz")).status_code == 200
        num_answers += 1
    status, answer = await task
    assert status == 400 and answer["error"]["param"] == "messages"
    assert num_answers >= least_answers
    await served.assert_healthy()
