"""The ledger must see what it is there for: it reads logs that a lying server made."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from bench.chaos.ledger import Ledger
from bench.chaos.record import Record
from bench.chaos.reference import Reference

PROMPT, PARAMS = "a prompt", {"max_tokens": 3, "temperature": 0.0}
TOKENS = Reference().tokens(PROMPT, PARAMS)[0]


def delta(tokens: list[int]) -> dict[str, Any]:
    return {"type": "job.delta", "deltas": [{"index": 0, "token_ids": tokens}]}


def log(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


GOOD = log(
    {"type": "job.queued"}, {"type": "job.started"}, delta(TOKENS[:1]), delta(TOKENS[1:]), {"type": "job.succeeded"}
)


def serving(events: list[dict[str, Any]], tokens: list[int], status: str = "succeeded") -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(202, json={"id": "job-1-x"})
        if request.url.path.endswith("/events"):
            return httpx.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))
        result = {"choices": [{"token_ids": tokens}]}
        return httpx.Response(200, json={"status": status, "error": None, "result": result})

    return httpx.MockTransport(answer)


Audit = Callable[..., Any]


@pytest.fixture
async def audit() -> AsyncIterator[Audit]:
    async def audited(events: list[dict[str, Any]], tokens: list[int] = TOKENS, status: str = "succeeded") -> Record:
        async with httpx.AsyncClient(transport=serving(events, tokens, status), base_url="http://x") as http:
            ledger, record = Ledger(http, Reference()), Record(promise="p", fault="f")
            await ledger.submit(PROMPT, PARAMS)
            await ledger.settle(record, seconds=5)
            return record

    yield audited


async def test_a_good_log_breaks_nothing(audit: Audit) -> None:
    record = await audit(GOOD)
    assert record.is_kept
    assert record.jobs == 1


async def test_a_missing_number_is_a_gap(audit: Audit) -> None:
    assert (await audit([event for event in GOOD if event["sequence_number"] != 1])).gaps == 1


async def test_a_repeated_number_and_a_second_end_are_duplicates(audit: Audit) -> None:
    assert (await audit([*GOOD[:2], GOOD[1], *GOOD[2:]])).duplicates == 1
    assert (await audit([*GOOD[:-1], GOOD[-1] | {"sequence_number": 4}, GOOD[-1] | {"sequence_number": 5}])).duplicates


async def test_another_end_than_promised_is_a_loss(audit: Audit) -> None:
    assert (await audit([*GOOD[:-1], {"type": "job.failed", "sequence_number": 4}], status="failed")).lost == 1


async def test_other_tokens_are_noticed(audit: Audit) -> None:
    wrong = [TOKENS[0], TOKENS[1] + 1, TOKENS[2]]
    events = [GOOD[0], GOOD[1], GOOD[2], GOOD[3] | delta(wrong[1:]), GOOD[4]]
    assert (await audit(events, wrong)).broken
    assert (await audit(GOOD, wrong)).broken  # the result alone
