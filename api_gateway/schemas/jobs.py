"""The job as clients write and see it. Times are Unix seconds, durations seconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from api_gateway.schemas.errors import ErrorDetail
from api_gateway.schemas.messages import MessageIn
from engine.params import SamplingParams
from infra.contracts import Kind, Tier, Webhook


class JobRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to generate, how, and until when.

    `input` is a text or a list of token ids (kind `generate`), or a list of messages (kind `chat`).
    """

    model: str
    input: str | list[int | MessageIn]
    kind: Kind | None = None  # implied by `input` where it is left out
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    tier: Tier = Tier.STANDARD
    priority: int = 0  # lower goes first among running work, under the policy `priority`
    deadline: float | str | None = None  # Unix seconds, or RFC 3339: expires if not finished by then
    queue_ttl: float | None = None  # expires if not started so many seconds after its submission
    attempt_timeout: float | None = None  # fails if one attempt runs longer
    webhook: Webhook | None = None
    metadata: dict[str, str] = {}


class BulkRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    jobs: list[msgspec.Raw]  # each a JobRequest; one that is refused does not hurt the others


class QueueView(msgspec.Struct, kw_only=True):
    position: int  # waiting jobs ahead in its tier
    ahead_tokens: int | None  # tokens of those, estimated
    eta_seconds: float | None  # until the first token, from measured rates; null until something was measured


class UsageView(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int


class LogprobView(msgspec.Struct, kw_only=True):
    token_id: int
    token: str
    logprob: float


class PositionLogprobsView(msgspec.Struct, kw_only=True):
    chosen: LogprobView
    top: list[LogprobView]


class ChoiceView(msgspec.Struct, kw_only=True):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[PositionLogprobsView] | None
    cumulative_logprob: float | None = None  # of a choice out of several candidates (beams, best_of), best first
    score: float | None = None  # what these were ranked by


class ResultView(msgspec.Struct, kw_only=True):
    choices: list[ChoiceView]
    prompt_logprobs: list[PositionLogprobsView | None] | None


class JobView(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["job"] = "job"
    model: str
    kind: Kind
    status: str
    tier: Tier
    priority: int
    attempt: int
    created_at: float
    started_at: float | None
    finished_at: float | None
    deadline: float | None
    queue: QueueView | None  # while it waits
    usage: UsageView | None  # once it has ended
    error: ErrorDetail | None
    result: ResultView | None
    params: dict[str, Any]  # as admitted: with the seed that was drawn
    metadata: dict[str, str]
    numerics_profile: str | None  # of its tokens: of the worker that emitted the first of them
    continued_profiles: list[str]  # numerics profiles, other than that, of workers that went on with them
    retry_of: str | None


class JobList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[JobView]
    last_id: str | None  # pass it as `after` for the next page
    has_more: bool


class BulkItem(msgspec.Struct, kw_only=True):
    status: int  # 202, or what the job alone would have been refused with
    job: JobView | None = None
    error: ErrorDetail | None = None


class BulkAnswer(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BulkItem]  # in the order of the request
    accepted: int
    refused: int


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: str
    deleted: bool = True


class DeltaView(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[PositionLogprobsView] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None


class EventView(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a job's log, as an event stream carries it."""

    type: str
    sequence_number: int
    at: float
    attempt: int | None = None
    deltas: list[DeltaView] | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    usage: UsageView | None = None
    error: ErrorDetail | None = None
    reason: str | None = None
    numerics_profile: str | None = None  # of a start: another profile goes on with the tokens that are there


class TimelineEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    at: float
    what: str
    attempt: int | None = None
    reason: str | None = None


class TimelineView(msgspec.Struct, kw_only=True):
    """Why a job took as long as it did."""

    id: str
    status: str
    queued_seconds: float  # until the first attempt, or until now or the end without one
    first_token_seconds: float | None  # after the submission
    total_seconds: float  # until the end, or until now
    entries: list[TimelineEntry] | None  # null where the event log has expired
    engine: dict[str, float]  # the last attempt's own figures
