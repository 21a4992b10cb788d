"""vllm #10583, transformers PR #48918: two overlapping prompts under one id of the client get each other's tokens.

Kind: anything that a client may repeat and a server may take for a key. Here `x-request-id`, `user`, `metadata` and
the connection are the client's own affair and mix nothing; an `Idempotency-Key` names one body and refuses another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from engine import LLM, EngineConfig, SamplingParams
from tests.cases.service import MODEL, Service

PROMPTS = ["the first of two", "another prompt altogether", "the first of two, and more"]
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 5}
IDS = {"x-request-id": "mine", "x-correlation-id": "mine"}


def slow_fake() -> LLM:
    """Slow enough that the requests overlap."""
    return LLM("fake", EngineConfig(num_kv_blocks=256, fake_seconds_per_step=0.002))


def alone(prompt: str) -> str:
    [output] = LLM("fake", EngineConfig(num_kv_blocks=256)).generate([prompt], SamplingParams(**SAMPLED))
    return output.choices[0].text


async def test_ids_of_the_client_mix_nothing(service: Callable[..., Any]) -> None:
    running: Service = await service(slow_fake)

    async def ask(prompt: str) -> str:
        body = {"model": MODEL, "prompt": prompt, "user": "one user", "metadata": {"id": "mine"}, **SAMPLED}
        answer = await running.client.post("/v1/completions", json=body, headers=IDS)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def stream(prompt: str) -> str:
        chunks = await running.chunks("completions", {"prompt": prompt, "user": "one user", **SAMPLED})
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    many = PROMPTS * 3
    answers = await asyncio.gather(*map(ask, many), *map(stream, many))
    assert answers == [alone(prompt) for prompt in many] * 2
    ids = [job["id"] for job in (await running.client.get("/v1/jobs?limit=100")).json()["data"]]
    assert len(set(ids)) == len(ids) == 2 * len(many)


async def test_one_idempotency_key_for_two_prompts_at_once_is_one_job(service: Callable[..., Any]) -> None:
    running: Service = await service(slow_fake)

    async def ask(prompt: str) -> tuple[int, str]:
        body = {"model": MODEL, "prompt": prompt, **SAMPLED}
        answer = await running.client.post("/v1/completions", json=body, headers={"idempotency-key": "mine", **IDS})
        said = answer.json()
        return answer.status_code, said["choices"][0]["text"] if answer.status_code == 200 else said["error"]["code"]

    answers = await asyncio.gather(*(ask(prompt) for prompt in [*PROMPTS[:2]] * 4))
    winner = next(prompt for prompt, (status, _) in zip([*PROMPTS[:2]] * 4, answers, strict=True) if status == 200)
    expected = {
        prompt: (200, alone(prompt)) if prompt == winner else (422, "idempotency_key_reused") for prompt in PROMPTS[:2]
    }
    assert answers == [expected[prompt] for prompt in [*PROMPTS[:2]] * 4]
    assert len((await running.client.get("/v1/jobs")).json()["data"]) == 1
