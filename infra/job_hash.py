"""Between the store's hashes and streams, and our records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from infra.contracts import (
    Event,
    EventBody,
    Job,
    JobError,
    JobSpec,
    NewJob,
    Notice,
    Outcome,
    Publication,
    Result,
    RunItem,
    Tier,
    Usage,
    Webhook,
    pack,
)
from infra.node import Argument
from infra.states import TERMINAL, Status
from infra.store import LaneLoad
from infra.tiers import STRIDES
from infra.work import Sizes, Work

_SPEC = msgspec.msgpack.Decoder(JobSpec)
_RESULT = msgspec.msgpack.Decoder(Result)
_ERROR = msgspec.msgpack.Decoder(JobError)
_TIMELINE = msgspec.msgpack.Decoder(dict[str, float])
_EVENT_BODY = msgspec.msgpack.Decoder(EventBody)
_WEBHOOK = msgspec.msgpack.Decoder(Webhook)
_RUN_ITEM = msgspec.msgpack.Decoder(RunItem)
_OPTIONAL_FIELDS = ("queue_ttl_ms", "deadline_ms", "attempt_timeout_ms", "watch_ms", "retry_of", "traceparent")


def pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    """A hash as HGETALL answers inside a script: names and values in turn."""
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


def fields_of(new: NewJob) -> list[Argument]:
    """Names and values of the record's fields that never change, but those that the script sets itself."""
    fields: list[Argument] = [
        "spec", pack(new.spec),
        "priority", new.priority,
        "tenant", new.tenant,
        "cost_tokens", new.cost_tokens,
        "output_tokens", new.spec.output_tokens,
    ]  # fmt: skip
    for name in _OPTIONAL_FIELDS:
        value = getattr(new, name)
        if value is not None:
            fields += [name, value]
    if new.spec.webhook is not None:
        wanted = f",{','.join(new.spec.webhook.events)}," if new.spec.webhook.events else "*"
        fields += ["webhook", pack(new.spec.webhook), "wanted", wanted]
    if new.spec.run_item is not None:
        fields += ["run_item", pack(new.spec.run_item)]
    return fields


def job_from(fields: Mapping[str, bytes], lane: int) -> Job:
    def number(name: str) -> int | None:
        return int(fields[name]) if fields.get(name) else None

    def text(name: str) -> str | None:
        return fields[name].decode() if fields.get(name) else None

    status = Status(fields["status"].decode())
    return Job(
        id=fields["id"].decode(),
        spec=_SPEC.decode(fields["spec"]),
        status=status,
        lane=lane,
        tier=Tier(fields["tier"].decode()),
        priority=int(fields["priority"]),
        tenant=fields["tenant"].decode(),
        cost_tokens=int(fields["cost_tokens"]),
        attempt=int(fields["attempt"]),
        lost_count=int(fields["lost_count"]),
        num_events=int(fields["num_events"]),
        created_ms=int(fields["created_ms"]),
        owner=text("owner"),
        started_ms=number("started_ms"),
        finished_ms=number("finished_ms"),
        deadline_ms=number("deadline_ms"),
        attempt_timeout_ms=number("attempt_timeout_ms"),
        profile=text("profile"),
        continued_profiles=(text("continued_profiles") or "").split(),
        retry_of=text("retry_of"),
        outcome=_outcome_from(fields, status) if status in TERMINAL else None,
        traceparent=text("traceparent"),
        stuck_count=number("stuck_count") or 0,
        lost_tokens=number("lost_tokens") or 0,
    )


def _outcome_from(fields: Mapping[str, bytes], status: Status) -> Outcome:
    return Outcome(
        status=status,
        result=_RESULT.decode(fields["result"]) if "result" in fields else None,
        usage=Usage(
            prompt_tokens=int(fields["prompt_tokens"]),
            completion_tokens=int(fields["completion_tokens"]),
            cached_tokens=int(fields["cached_tokens"]),
        ),
        error=_ERROR.decode(fields["error"]) if "error" in fields else None,
        timeline=_TIMELINE.decode(fields["timeline"]) if "timeline" in fields else {},
    )


def fields_of_outcome(outcome: Outcome) -> list[Argument]:
    """Names and values of what an outcome adds to a record."""
    fields: list[Argument] = [
        "prompt_tokens", outcome.usage.prompt_tokens,
        "completion_tokens", outcome.usage.completion_tokens,
        "cached_tokens", outcome.usage.cached_tokens,
    ]  # fmt: skip
    if outcome.result is not None:
        fields += ["result", pack(outcome.result)]
    if outcome.error is not None:
        fields += ["error", pack(outcome.error)]
    if outcome.timeline:
        fields += ["timeline", pack(outcome.timeline)]
    return fields


def arguments_of(publication: Publication | None) -> list[Argument]:
    """First number, count of events, then four values an event: what `append_deltas` reads."""
    if publication is None:
        return ["", 0]
    first = publication.first_number
    arguments: list[Argument] = ["" if first is None else first, len(publication.events)]
    for body in publication.events:
        num_tokens = sum(len(delta.token_ids) for delta in body.deltas)
        prompt, cached = body.num_prompt_tokens, body.num_cached_tokens
        arguments += [pack(body), num_tokens, "" if prompt is None else prompt, "" if cached is None else cached]
    return arguments


def events_from(entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> list[Event]:
    return [
        Event(
            type=fields[b"t"].decode(),
            sequence_number=int(entry_id.partition(b"-")[0]) - 1,
            at_ms=int(fields[b"ms"]),
            body=_EVENT_BODY.decode(fields[b"b"]),
        )
        for entry_id, fields in entries
    ]


def events_from_script(entries: Sequence[tuple[bytes, Sequence[bytes]]]) -> list[Event]:
    """The same entries as a script hands them on: names and values in turn."""
    return events_from((entry_id, dict(zip(flat[::2], flat[1::2], strict=True))) for entry_id, flat in entries)


def load_from(answer: Sequence[int]) -> LaneLoad:
    """What `load.lua` found."""
    paused, *rest = answer
    tiers, sums = rest[: 5 * len(Tier)], rest[5 * len(Tier) :]
    by_tier = {str(tier): tiers[5 * index : 5 * index + 5] for index, tier in enumerate(STRIDES)}
    return LaneLoad(
        waiting={tier: counts[0] for tier, counts in by_tier.items()},
        running=sum(max(0, counts[2] - counts[0]) for counts in by_tier.values()),
        paused=paused == 1,
        delayed=sum(counts[1] for counts in by_tier.values()),
        work={tier: Work(counts[3], counts[4]) for tier, counts in by_tier.items()},
        sizes=Sizes(*sums),
    )


def notice_from(notice_id: bytes, flat: Sequence[bytes], lane: int) -> Notice:
    fields = pairs(flat)
    is_webhook = fields["topic"] == b"webhook"
    return Notice(
        id=notice_id.decode(),
        job_id=fields["job_id"].decode(),
        lane=lane,
        topic="webhook" if is_webhook else "run",
        event=fields["event"].decode(),
        sequence_number=int(fields["sequence_number"]),
        created_ms=int(fields["created_ms"]),
        tries=int(fields["tries"]),
        webhook=_WEBHOOK.decode(fields["payload"]) if is_webhook else None,
        run_item=None if is_webhook else _RUN_ITEM.decode(fields["payload"]),
        traceparent=fields["traceparent"].decode() or None,
    )
