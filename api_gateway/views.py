"""Jobs and events as clients see them: made from records, never kept. Pure."""

from __future__ import annotations

import math
from typing import Any

from api_gateway.errors import CALLERS_FAULTS, error_type
from api_gateway.schemas.errors import ErrorDetail
from api_gateway.schemas.jobs import (
    ChoiceView,
    DeltaView,
    EventView,
    JobView,
    LogprobView,
    PositionLogprobsView,
    QueueView,
    ResultView,
    TimelineEntry,
    TimelineView,
    UsageView,
)
from infra.contracts import (
    Choice,
    ChoiceDelta,
    Event,
    Job,
    JobError,
    PositionLogprobs,
    Result,
    TokenLogprob,
    Usage,
)

LEAST_LOGPROB = -9999.0  # JSON knows no infinity


def seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _finite_or_none(value: float | None) -> float | None:
    return None if value is None else finite(value)


def job_view(job: Job, *, queue: QueueView | None = None, result: Result | None = None) -> JobView:
    outcome = job.outcome
    return JobView(
        id=job.id,
        model=job.spec.model,
        kind=job.spec.kind,
        status=job.status,
        tier=job.tier,
        priority=job.priority,
        attempt=job.attempt,
        created_at=job.created_ms / 1000,
        started_at=seconds(job.started_ms),
        finished_at=seconds(job.finished_ms),
        deadline=seconds(job.deadline_ms),
        queue=queue,
        usage=usage_view(outcome.usage) if outcome else None,
        error=error_view(outcome.error) if outcome and outcome.error else None,
        result=result_view(result) if result else None,
        params=_with_text_keys(job.spec.params),
        metadata=job.spec.metadata,
        numerics_profile=job.profile,
        continued_profiles=job.continued_profiles,
        retry_of=job.retry_of,
    )


def usage_view(usage: Usage) -> UsageView:
    return UsageView(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        cached_tokens=usage.cached_tokens,
    )


def error_view(error: JobError) -> ErrorDetail:
    status = 400 if error.code in CALLERS_FAULTS else 500
    return ErrorDetail(message=error.message, type=error_type(status), param=error.param, code=error.code)


def result_view(result: Result) -> ResultView:
    positions = result.prompt_logprobs
    return ResultView(
        choices=[_choice_view(choice) for choice in result.choices],
        prompt_logprobs=None
        if positions is None
        else [None if one is None else _position_view(one) for one in positions],
    )


def event_view(event: Event) -> EventView:
    body = event.body
    return EventView(
        type=event.type,
        sequence_number=event.sequence_number,
        at=event.at_ms / 1000,
        attempt=body.attempt or None,
        deltas=[_delta_view(delta) for delta in body.deltas] or None,
        num_prompt_tokens=body.num_prompt_tokens,
        num_cached_tokens=body.num_cached_tokens,
        usage=usage_view(body.usage) if body.usage else None,
        error=error_view(body.error) if body.error else None,
        reason=body.reason,
        numerics_profile=body.profile,
    )


def timeline_view(job: Job, events: list[Event] | None, *, now_ms: int) -> TimelineView:
    """`events` is the job's log, or None where it has expired."""
    end_ms = job.finished_ms or now_ms
    first_delta = next((event for event in events or [] if event.body.deltas), None)
    return TimelineView(
        id=job.id,
        status=job.status,
        queued_seconds=((job.started_ms or end_ms) - job.created_ms) / 1000,
        first_token_seconds=None if first_delta is None else (first_delta.at_ms - job.created_ms) / 1000,
        total_seconds=(end_ms - job.created_ms) / 1000,
        entries=None if events is None else [_entry(event) for event in events if _is_told(event, first_delta)],
        engine={} if job.outcome is None else job.outcome.timeline,
    )


def _is_told(event: Event, first_delta: Event | None) -> bool:
    """Of the deltas, only the first says something about time."""
    return event.type != "job.delta" or event is first_delta


def _entry(event: Event) -> TimelineEntry:
    what = "first_token" if event.type == "job.delta" else event.type.removeprefix("job.")
    return TimelineEntry(at=event.at_ms / 1000, what=what, attempt=event.body.attempt or None, reason=event.body.reason)


def _choice_view(choice: Choice) -> ChoiceView:
    return ChoiceView(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=_positions(choice.logprobs),
        cumulative_logprob=_finite_or_none(choice.cumulative_logprob),
        score=_finite_or_none(choice.score),
    )


def _delta_view(delta: ChoiceDelta) -> DeltaView:
    return DeltaView(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_positions(delta.logprobs),
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        cumulative_logprob=_finite_or_none(delta.cumulative_logprob),
        score=_finite_or_none(delta.score),
    )


def _positions(positions: list[PositionLogprobs] | None) -> list[PositionLogprobsView] | None:
    return None if positions is None else [_position_view(position) for position in positions]


def _position_view(position: PositionLogprobs) -> PositionLogprobsView:
    return PositionLogprobsView(chosen=_logprob(position.chosen), top=[_logprob(token) for token in position.top])


def _logprob(token: TokenLogprob) -> LogprobView:
    return LogprobView(token_id=token.token_id, token=token.token, logprob=finite(token.logprob))


def _with_text_keys(params: dict[str, Any]) -> dict[str, Any]:
    """JSON has no integer keys; `logit_bias` does."""
    bias = params.get("logit_bias")
    return params if not bias else {**params, "logit_bias": {str(key): value for key, value in bias.items()}}
