"""Exact continuation: workers of a real model are killed, and every answer is what it would have been."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx

from bench.chaos.ledger import Ask, Audit, Ledger
from bench.chaos.record import Record
from bench.chaos.scenarios.ending import finish
from bench.chaos.site import Site, Worker
from bench.chaos.yard import NotHere, Yard
from engine.errors import ModelLoadError
from engine.weights import resolve

MODEL = "smollm2-135m"
REAL: dict[str, Any] = {
    "model": MODEL,
    "lease_seconds": 4.0,
    "engine": {"num_kv_blocks": 512, "num_threads": 1, "fake_seconds_per_step": 0.0},
}
_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "presence_penalty": 0.3},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 1, "stop": [".\n"]},
]


async def continuation(yard: Yard) -> Record:
    record = Record(promise="exact continuation", fault="SIGKILL mid-generation, real model, greedy and seeded")
    try:
        await asyncio.to_thread(resolve, MODEL)
    except ModelLoadError as error:
        raise NotHere(str(error)) from error
    count, num_kinds, num_kills = yard.size(8, 200), yard.size(5, 20), yard.size(1, 12)
    kinds = [_kind(number, num_tokens=yard.size(24, 48)) for number in range(num_kinds)]
    async with yard.site() as site:
        await site.gateway()
        workers = [await site.worker(**REAL) for _ in range(1 if yard.short else 2)]
        # Not the reference of another process: the undisturbed run is the service's own, before anything is hurt.
        undisturbed = Ledger(site.http, None)
        for kind in kinds:
            await undisturbed.submit_until_accepted(*kind, model=MODEL)
        await undisturbed.settle(record, seconds=300)
        answers = [_answer(undisturbed.audits[job_id]) for job_id in undisturbed.told]
        ledger = Ledger(site.http, None)
        ids = [
            await ledger.submit_until_accepted(*kinds[number % num_kinds], model=MODEL) for number in range(count)
        ]  # fmt: skip
        killed = await _kill_busy_workers(site, workers, num_kills, num_tokens=yard.size(24, 60))
        await finish(site, ledger, record, seconds=300)
        for number, job_id in enumerate(ids):
            for what, mine in _answer(ledger.audits[job_id]).items():
                is_same = mine == answers[number % num_kinds][what]
                record.demand(is_same, f"{job_id}: {what} differ from the undisturbed run's")
        continued = [audit for audit in ledger.audits.values() if _tokens_before_requeue(audit.events)]
        record.demand(continued, "no job was continued in the middle: the fault did not happen")
        record.demand(killed == num_kills, f"{killed} of {num_kills} kills: the jobs had ended before")
        record.figures = {
            "kills": killed,
            "continued mid-generation": len(continued),
            "most attempts of a job": max(audit.attempts for audit in ledger.audits.values()),
            "model": MODEL,
        }
    return record


def _kind(number: int, *, num_tokens: int) -> Ask:
    params = {"max_tokens": num_tokens, "seed": number, **_KINDS[number % len(_KINDS)]}
    return f"Write a tale about {number} mills.", params if "stop" in params else params | {"ignore_eos": True}


def _answer(audit: Audit) -> dict[str, Any]:
    """All that a death must not change."""
    choices = audit.view["result"]["choices"]
    parts = ("token_ids", "text", "finish_reason", "stop_reason", "logprobs")
    usage = {name: audit.view["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {part: [choice.get(part) for choice in choices] for part in parts} | {"usage": usage}


async def _kill_busy_workers(site: Site, workers: list[Worker], num_kills: int, *, num_tokens: int) -> int:
    """Each victim generates `num_tokens` tokens first. How many were killed before there was no work."""
    chance = random.Random(5)
    for number in range(num_kills):
        victim = chance.choice(workers)
        before = await _num_generated(victim)
        while await _num_generated(victim) < before + num_tokens:
            if await site.unfinished() == 0:
                return number
            await asyncio.sleep(0.05)
        await victim.kill()
        await victim.start()
    return num_kills


async def _num_generated(worker: Worker) -> float:
    try:
        return await worker.metric("generation_tokens_total")
    except httpx.TransportError:
        return 0.0  # it is just starting


def _tokens_before_requeue(events: list[dict[str, Any]]) -> bool:
    kinds = [event["type"] for event in events]
    return "job.requeued" in kinds and "job.delta" in kinds[: kinds.index("job.requeued")]
