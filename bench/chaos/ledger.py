"""The external ledger: what clients were told, held against what became of it. It trusts HTTP answers alone.

accepted (202 and an id)  ->  one terminal event, numbers 0..n without gap or repeat, the undisturbed tokens
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import msgspec

from bench.chaos.process import ChaosFailed
from bench.chaos.record import Record
from bench.chaos.reference import Reference

AT_ONCE = 24
PAUSE_SECONDS = 0.1
Ask = tuple[str, dict[str, Any]]  # prompt, params
_WORTH_REPEATING = {0, 202, 429, 500, 502, 503, 504}
TERMINAL = {"job.succeeded", "job.failed", "job.cancelled", "job.expired"}


class Told(msgspec.Struct):
    """One accepted job: what was asked, and which outcomes may come of it."""

    prompt: str
    params: dict[str, Any]
    may_end: frozenset[str]


class Audit(msgspec.Struct):
    """One job's log as a client read it."""

    id: str
    events: list[dict[str, Any]]
    view: dict[str, Any] = {}  # the job's record as a client sees it after the end

    @property
    def numbers(self) -> list[int]:
        return [event["sequence_number"] for event in self.events]

    @property
    def ends(self) -> list[str]:
        return [event["type"] for event in self.events if event["type"] in TERMINAL]

    @property
    def attempts(self) -> int:
        return sum(event["type"] == "job.started" for event in self.events)

    @property
    def requeues(self) -> list[str]:
        return [event["reason"] for event in self.events if event["type"] == "job.requeued"]

    @property
    def tokens(self) -> list[list[int]]:
        """By choice."""
        found: dict[int, list[int]] = {}
        for event in self.events:
            for delta in event.get("deltas", ()):
                found.setdefault(delta["index"], []).extend(delta.get("token_ids", ()))
        return [found[index] for index in sorted(found)]


class Ledger:
    """What one scenario's clients were told. All waiting is bounded by the scenario's own time-out."""

    def __init__(self, http: httpx.AsyncClient, reference: Reference | None) -> None:
        self._http = http
        self._reference = reference
        self.told: dict[str, Told] = {}
        self.answers: dict[int, int] = {}  # HTTP status -> how often; 0: no answer
        self.audits: dict[str, Audit] = {}
        self.last_refusal = ""

    async def submit(self, prompt: str, params: dict[str, Any], *, model: str = "fake",
                     may_end: Iterable[str] = ("job.succeeded",), headers: dict[str, str] | None = None,
                     **fields: Any) -> str | None:  # fmt: skip
        """The id if the job was accepted; None where it was refused, or nobody knows."""
        body = {"model": model, "input": prompt, "params": params, **fields}
        try:
            answer = await self._http.post("/v1/jobs", json=body, headers=headers)
        except httpx.TransportError:
            self._count(0)
            return None
        self._count(answer.status_code)
        self.last_refusal = answer.text[:300]
        if answer.status_code != 202:
            return None
        return self.note(answer.json()["id"], prompt, params, may_end)

    async def submit_until_accepted(self, prompt: str, params: dict[str, Any], **fields: Any) -> str:
        """Again and again, under one idempotency key, as a client should."""
        headers = {"idempotency-key": secrets.token_hex(12)}
        while True:
            job_id = await self.submit(prompt, params, headers=headers, **fields)
            if job_id is not None:
                return job_id
            if set(self.answers) - _WORTH_REPEATING:
                raise ChaosFailed(f"a submit was refused for good: {self.last_refusal}")
            await asyncio.sleep(PAUSE_SECONDS)

    async def submit_many(self, asks: Iterable[Ask], *, page: int = 250,
                          may_end: Iterable[str] = ("job.succeeded",), **fields: Any) -> int:  # fmt: skip
        """Through the bulk route, each page repeated under one key until all of it is accepted. How many."""
        count = 0
        for batch in _batched(asks, page):
            jobs = [{"model": "fake", "input": prompt, "params": params, **fields} for prompt, params in batch]
            headers = {"idempotency-key": secrets.token_hex(12)}
            while True:
                try:
                    answer = await self._http.post("/v1/jobs/bulk", json={"jobs": jobs}, headers=headers)
                except httpx.TransportError:
                    self._count(0)
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                items = answer.json()["data"] if answer.status_code == 200 else []
                for (prompt, params), item in zip(batch, items, strict=bool(items)):
                    self._count(item["status"])
                    if item["status"] == 202:
                        self.note(item["job"]["id"], prompt, params, may_end)
                if items and all(item["status"] == 202 for item in items):
                    break
                await asyncio.sleep(PAUSE_SECONDS)
            count += len(batch)
        return count

    def note(self, job_id: str, prompt: str, params: dict[str, Any], may_end: Iterable[str]) -> str:
        self.told[job_id] = Told(prompt, params, frozenset(may_end))
        return job_id

    async def attempts(self, job_id: str) -> int:
        """Attempts of a job begun so far."""
        answer = await self._http.get(f"/v1/jobs/{job_id}")
        return int(answer.json()["attempt"])

    async def follow(self, job_id: str, *, starting_after: int = -1) -> AsyncIterator[dict[str, Any]]:
        """Events as one connection brings them; ends with the log or the connection."""
        async with self._http.stream(
            "GET", f"/v1/jobs/{job_id}/events", params={"starting_after": starting_after}
        ) as answer:
            if answer.status_code != 200:
                return
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    yield json.loads(line[6:])

    async def read_log(self, job_id: str) -> Audit:
        """The whole log, over as many connections as it takes. Waits for the end."""
        events: list[dict[str, Any]] = []
        while not events or events[-1]["type"] not in TERMINAL:
            after = events[-1]["sequence_number"] if events else -1
            try:
                async for event in self.follow(job_id, starting_after=after):
                    if "sequence_number" not in event:
                        break  # an error frame: come back
                    events.append(event)
            except httpx.TransportError:
                pass
            if not events or events[-1]["type"] not in TERMINAL:
                await asyncio.sleep(PAUSE_SECONDS)
        return Audit(job_id, events)

    async def settle(self, record: Record, *, seconds: float) -> None:
        """Reads every accepted job's log to its end and result, and counts what is wrong into `record`."""
        slots = asyncio.Semaphore(AT_ONCE)

        async def audit(job_id: str) -> None:
            async with slots:
                audit = self.audits[job_id] = await self.read_log(job_id)
                audit.view = await self._view(job_id)
                self._judge(record, audit)

        try:
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for job_id in self.told:
                    group.create_task(audit(job_id))
        except TimeoutError:
            missing = [job_id for job_id in self.told if job_id not in self.audits]
            record.lost += len(missing)
            record.broken.append(f"{len(missing)} jobs without an end after {seconds:.0f} s, {missing[0]} among them")
        record.jobs += len(self.told)

    async def _view(self, job_id: str) -> dict[str, Any]:
        while True:
            try:
                answer = await self._http.get(f"/v1/jobs/{job_id}")
                if answer.status_code == 200:
                    view: dict[str, Any] = answer.json()
                    return view
            except httpx.TransportError:
                pass
            await asyncio.sleep(PAUSE_SECONDS)

    def _judge(self, record: Record, audit: Audit) -> None:
        told, view = self.told[audit.id], audit.view
        numbers, expected = audit.numbers, range(max(audit.numbers) + 1)
        record.duplicates += len(numbers) - len(set(numbers)) + len(audit.ends) - 1
        record.gaps += len(set(expected) - set(numbers))
        record.demand(numbers == sorted(numbers), f"{audit.id}: events out of order")
        if audit.ends[-1] not in told.may_end:
            record.lost += 1
            record.demand(False, f"{audit.id} ended as {audit.ends[-1]}: {view['error']}")
            return
        record.demand(f"job.{view['status']}" == audit.ends[-1], f"{audit.id}: record and log name different ends")
        if audit.ends[-1] != "job.succeeded":
            return
        record.demand(
            [choice["token_ids"] for choice in view["result"]["choices"]] == audit.tokens,
            f"{audit.id}: result and log hold different tokens",
        )
        if self._reference is None:
            return
        for mine, undisturbed in zip(audit.tokens, self._reference.tokens(told.prompt, told.params), strict=True):
            if mine != undisturbed:
                record.duplicates += len(mine) > len(undisturbed)
                record.gaps += len(mine) < len(undisturbed)
                record.broken.append(f"{audit.id}: tokens differ from the undisturbed run's")

    def _count(self, status: int) -> None:
        self.answers[status] = self.answers.get(status, 0) + 1


def _batched(items: Iterable[Ask], size: int) -> Iterable[tuple[Ask, ...]]:
    rest = iter(items)
    while batch := tuple(itertools.islice(rest, size)):
        yield batch
