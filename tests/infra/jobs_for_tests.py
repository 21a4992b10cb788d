"""Small makers that the store's tests share."""

from __future__ import annotations

import asyncio

from infra import keys
from infra.contracts import (
    Choice,
    ChoiceDelta,
    Claim,
    Event,
    EventBody,
    JobSpec,
    Kind,
    NewJob,
    Outcome,
    Publication,
    Result,
    RunItem,
    Tier,
    Usage,
    Webhook,
)
from infra.states import Status
from infra.store import JobStore

ALIAS = "model"
LEASE = 30.0
SHORT = 0.03  # seconds: a lease that shall lapse
LONGER = 0.05  # seconds: until it has
ENOUGH_MS = 800  # for a few calls of a store on a crowded machine


async def lapse() -> None:
    await asyncio.sleep(LONGER)


def new_job(
    lane: int,
    unique: str | None = None,
    *,
    tier: Tier = Tier.STANDARD,
    cost_tokens: int = 10,
    tenant: str = "default",
    webhook: Webhook | None = None,
    run_item: RunItem | None = None,
    queue_ttl_ms: int | None = None,
    deadline_ms: int | None = None,
    attempt_timeout_ms: int | None = None,
) -> NewJob:
    spec = JobSpec(
        model=ALIAS,
        kind=Kind.GENERATE,
        prompt="Once upon a time — 在很久以前 🙂",
        params={"max_tokens": 8, "seed": 7},
        webhook=webhook,
        run_item=run_item,
    )
    return NewJob(
        id=keys.new_job_id(lane, unique),
        spec=spec,
        tier=tier,
        tenant=tenant,
        cost_tokens=cost_tokens,
        queue_ttl_ms=queue_ttl_ms,
        deadline_ms=deadline_ms,
        attempt_timeout_ms=attempt_timeout_ms,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


async def submitted(store: JobStore, lane: int, unique: str | None = None, **fields: object) -> str:
    """The id of a job just admitted."""
    job = new_job(lane, unique, **fields)  # type: ignore[arg-type]
    assert await store.submit(job)
    return job.id


async def claimed(store: JobStore, lane: int, owner: str = "worker-1", *, lease_seconds: float = LEASE) -> Claim:
    """A claim that must succeed."""
    claim = await store.claim(lane, owner, free_tokens=None, lease_seconds=lease_seconds)
    assert claim is not None
    return claim


def delta(text: str, *token_ids: int, attempt: int = 1, finish_reason: str | None = None) -> EventBody:
    return EventBody(
        attempt=attempt,
        deltas=[ChoiceDelta(index=0, text=text, token_ids=list(token_ids), finish_reason=finish_reason)],
        num_prompt_tokens=5,
        num_cached_tokens=2,
    )


def publication(claim: Claim, *events: EventBody, first_number: int | None = None) -> Publication:
    return Publication(hold=claim.hold, events=list(events), first_number=first_number)


def success(text: str = "done", *token_ids: int) -> Outcome:
    return Outcome(
        status=Status.SUCCEEDED,
        result=Result(choices=[Choice(index=0, text=text, token_ids=list(token_ids), finish_reason="stop")]),
        usage=Usage(prompt_tokens=5, completion_tokens=len(token_ids), cached_tokens=2),
        timeline={"prefill_seconds": 0.25},
    )


def types(events: list[Event]) -> list[str]:
    return [event.type.removeprefix("job.") for event in events]


async def check_log(store: JobStore, job_id: str) -> list[Event]:
    """The whole log, its numbers from 0 without gap or repeat, at most one end, and that the last."""
    events = await store.events(job_id)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    job = await store.get(job_id)
    assert job is not None and job.num_events == len(events)
    assert [event.is_last for event in events[:-1]].count(True) == 0
    return events
