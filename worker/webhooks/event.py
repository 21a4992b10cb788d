"""What a webhook says: thin, the same bytes at each try. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from infra.contracts import Notice
from infra.runs import RunHeader
from infra.states import Status

MAX_BODY_BYTES = 20_000


@dataclass(frozen=True, slots=True)
class Message:
    """One thing to tell one endpoint. `id` is its `webhook-id`, the same however often it is tried."""

    id: str
    url: str
    type: str
    body: bytes
    traceparent: str | None = None


def of_notice(notice: Notice, *, public_url: str = "") -> Message:
    """Of a job's change. Raises ValueError for a notice that names no endpoint."""
    if notice.webhook is None:
        raise ValueError(f"notice {notice.id} names no endpoint")
    status = notice.event.removeprefix("job.")
    return _message(
        unique=f"{notice.lane}:{notice.id}",
        url=notice.webhook.url,
        type=notice.event,
        at_ms=notice.created_ms,
        data={
            "id": notice.job_id,
            "object": "job",
            "status": "running" if status == "started" else status,
            "sequence_number": notice.sequence_number,
            "url": f"{public_url}/v1/jobs/{notice.job_id}",
        },
        traceparent=notice.traceparent,
    )


def of_run(header: RunHeader, *, public_url: str = "") -> Message | None:
    """Of a run's end; None where nobody wants to be told."""
    webhook = header.run.webhook
    event = "run.completed" if header.status is Status.SUCCEEDED else "run.failed"
    if webhook is None or (webhook.events and event not in webhook.events):
        return None
    return _message(
        unique=f"{header.run.id}:{event}",
        url=webhook.url,
        type=event,
        at_ms=header.finished_ms or header.created_ms,
        data={
            "id": header.run.id,
            "object": "run",
            "status": header.status,
            "sequence_number": header.sequence_number,
            "url": f"{public_url}/v1/runs/{header.run.id}",
        },
        traceparent=header.run.traceparent,
    )


def _message(*, unique: str, url: str, type: str, at_ms: int, data: dict[str, Any], traceparent: str | None) -> Message:
    webhook_id = "evt_" + hashlib.sha256(unique.encode()).hexdigest()[:32]
    body = msgspec.json.encode(
        {
            "id": webhook_id,
            "object": "event",
            "type": type,
            "created_at": at_ms // 1000,
            "timestamp": datetime.fromtimestamp(at_ms / 1000, UTC),
            "data": data,
        }
    )
    if len(body) >= MAX_BODY_BYTES:
        raise ValueError(f"the body of {webhook_id} takes {len(body)} bytes, {MAX_BODY_BYTES} or more")
    return Message(webhook_id, url, type, body, traceparent)
