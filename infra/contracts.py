"""Records that processes exchange: MessagePack inside, JSON outside, validated by msgspec.

Times are integer milliseconds of the Redis server's clock (`*_ms`). Records carry a version `v`; each release reads its
own and the previous one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec

from infra.states import Status

VERSION = 1


class Struct(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Base of all records. Unknown fields are ignored on reading, so that a newer release may add some."""


class Tier(StrEnum):
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"


class Kind(StrEnum):
    GENERATE = "generate"
    CHAT = "chat"


class Message(Struct):
    role: str
    content: str
    name: str | None = None


class Webhook(Struct):
    """Where to tell the end of a job. `events` names the types wanted (API.md); empty means every terminal one."""

    url: str
    events: list[str] = []


class RunItem(Struct):
    """Marks a job as a child of a run: its end wakes the run."""

    run_id: str
    item_id: str


class JobSpec(Struct):
    """What was asked for; never changes after submit.

    Exactly one of `messages`, `prompt`, `prompt_token_ids`, `blob` is set.
    `params` holds `engine.params.SamplingParams` as a plain mapping, validated before submit, its seed drawn.
    `blob` names a blob with this spec's MessagePack where it is too large for the store.
    """

    model: str
    kind: Kind
    params: dict[str, Any] = {}
    messages: list[Message] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    blob: str | None = None
    metadata: dict[str, str] = {}
    webhook: Webhook | None = None
    run_item: RunItem | None = None
    salt: str = ""  # prefix-cache domain, derived by the gateway from the tenant, never the caller's alone
    v: int = VERSION

    @property
    def num_sequences(self) -> int:
        """What grows in the engine: a sequence for each choice, or for each candidate that may become one."""
        return int(self.params.get("best_of") or self.params.get("n") or 1)

    @property
    def output_tokens(self) -> int:
        """Tokens that may be generated at most, all sequences together."""
        return self.num_sequences * int(self.params.get("max_tokens") or 0)


class NewJob(Struct):
    """A job about to be admitted. Writing it twice with one id writes it once."""

    id: str
    spec: JobSpec
    tier: Tier = Tier.STANDARD
    priority: int = 0
    tenant: str = "default"
    cost_tokens: int = (
        0  # KV tokens it may come to hold: prompt plus what it may generate, times choices where they part
    )
    queue_ttl_ms: int | None = None  # expires if not started so long after its submission
    deadline_ms: int | None = None  # expires if not finished by this point of Redis time
    attempt_timeout_ms: int | None = None  # one attempt may not run longer
    watch_ms: int | None = None  # cancelled unless `JobStore.watch` comes within this time: somebody waits for it
    retry_of: str | None = None  # the dead letter that this job tries again
    traceparent: str | None = None

    def queued(self, lane: int, created_ms: int) -> Job:
        """Its record, once it is admitted."""
        return Job(
            id=self.id,
            spec=self.spec,
            status=Status.QUEUED,
            lane=lane,
            tier=self.tier,
            priority=self.priority,
            tenant=self.tenant,
            cost_tokens=self.cost_tokens,
            attempt=0,
            lost_count=0,
            num_events=1,
            created_ms=created_ms,
            deadline_ms=self.deadline_ms,
            attempt_timeout_ms=self.attempt_timeout_ms,
            retry_of=self.retry_of,
            traceparent=self.traceparent,
        )


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class TokenLogprob(Struct, array_like=True):
    token_id: int
    token: str
    logprob: float


class PositionLogprobs(Struct, array_like=True):
    chosen: TokenLogprob
    top: list[TokenLogprob]


class ChoiceDelta(Struct):
    """What one flush added to one choice of a job."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # with a choice that is told whole, at its end
    score: float | None = None


class Choice(Struct):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None  # of a choice out of several candidates, beams included
    score: float | None = None  # what these were ranked by; choices are in its order


class Result(Struct):
    choices: list[Choice] = []
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    blob: str | None = None  # names a blob with this result's MessagePack where it is too large for the store
    v: int = VERSION


class JobError(Struct):
    """Why a job failed. `code` is stable, `message` says what is wrong and what to do."""

    code: str
    message: str
    param: str | None = None


class Outcome(Struct):
    """The end of a job, committed once."""

    status: Status
    result: Result | None = None
    usage: Usage = msgspec.field(default_factory=Usage)
    error: JobError | None = None
    timeline: dict[str, float] = {}


class Job(Struct):
    """A job's durable record as it stands."""

    id: str
    spec: JobSpec
    status: Status
    lane: int
    tier: Tier
    priority: int
    tenant: str
    cost_tokens: int
    attempt: int
    lost_count: int  # leases lost; hand-overs are none
    num_events: int  # the next sequence number
    created_ms: int
    owner: str | None = None
    started_ms: int | None = None  # of the first attempt
    finished_ms: int | None = None
    deadline_ms: int | None = None
    attempt_timeout_ms: int | None = None
    profile: str | None = None  # numerics profile of its tokens: of the attempt that emitted the first
    continued_profiles: list[str] = []  # others, of the same weights, that were to go on with them
    retry_of: str | None = None
    outcome: Outcome | None = None
    traceparent: str | None = None
    stuck_count: int = 0  # of the lost leases, the last in a row by which the job had got no further
    lost_tokens: int = 0  # tokens published when the last lease was lost


EventType = Literal[
    "job.queued", "job.started", "job.delta", "job.requeued",
    "job.succeeded", "job.failed", "job.cancelled", "job.expired",
]  # fmt: skip


class EventBody(Struct):
    """What an event says beside its type, number and time."""

    attempt: int = 0
    deltas: list[ChoiceDelta] = []
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    usage: Usage | None = None
    error: JobError | None = None
    reason: str | None = None  # of a requeue: "hand_over", "lease_lost", "retry"
    profile: str | None = None  # of a start: the numerics profile that goes on with another one's tokens


class Event(Struct):
    """One entry of a job's event log. `sequence_number` counts from 0 without gaps; its stream id is `(n + 1)-0`."""

    type: str
    sequence_number: int
    at_ms: int
    body: EventBody

    @property
    def is_last(self) -> bool:
        return self.type.removeprefix("job.") in ("succeeded", "failed", "cancelled", "expired")


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's right to write to a job: valid while the record's attempt is this one and it runs."""

    job_id: str
    attempt: int


class Claim(Struct):
    """A job handed to a worker, with the events of earlier attempts to go on from (empty at the first)."""

    job: Job
    history: list[Event] = []

    @property
    def hold(self) -> Hold:
        return Hold(job_id=self.job.id, attempt=self.job.attempt)


class Publication(Struct):
    """New events of one job, written all or not at all, if the hold is still good.

    `first_number` is the sequence number that the first of them is due to get; the holder knows it from the claim
    (`job.num_events`) and from what it published since. Events already there are not written again, so a call may be
    repeated when its reply was lost. None: whichever number is next, and a repetition repeats.
    """

    hold: Hold
    events: list[EventBody]  # each becomes one `job.delta`
    first_number: int | None = None


class Notice(Struct):
    """One entry of a lane's outbox: what must be told to the outside after a job changed.

    Kept until whoever finished the work deletes it; claiming it only hides it for a while.
    """

    id: str
    job_id: str
    lane: int
    topic: Literal["webhook", "run"]
    event: str  # "job.succeeded", ...
    sequence_number: int
    created_ms: int
    tries: int  # times it has been claimed, this one included
    webhook: Webhook | None = None
    run_item: RunItem | None = None
    traceparent: str | None = None


class Pace(Struct):
    """What a worker's engine takes, measured: `step + outputs * output + prompts * prompt` seconds for a step."""

    seconds_per_step: float
    seconds_per_output_token: float
    seconds_per_prompt_token: float
    num_seats: int  # sequences that run at once
    kv_tokens: int  # token slots of the KV pool


class WorkerRecord(Struct):
    """What a live worker tells of itself again and again; forgotten where it stops telling."""

    owner: str
    alias: str
    lanes: list[int]
    num_seats: int
    free_tokens: int  # KV tokens that jobs may be claimed for
    num_jobs: int  # that it holds, those whose end is being written included
    remaining: list[int] = []  # output tokens that each running sequence may still draw, ascending
    prompt_tokens: int = 0  # of its jobs, still to be computed
    pace: Pace | None = None  # None until measured
    takes_jobs: bool = True  # False while it drains, or its engine hangs
    age_ms: int = 0  # of what is told here; set by the store on reading


class ModelCard(Struct):
    """What the gateway must know of an alias to admit work for it; valid when no worker runs."""

    alias: str
    max_model_len: int
    vocab_size: int
    tokenizer_digest: str
    tokenizer_blob: str  # blob with tokenizer.json
    weights_digest: str
    profile: str  # numerics profile of the workers
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    eos_token_ids: list[int] = []
    prefill_tokens_per_s: float | None = None  # measured; None until a worker has measured it
    decode_tokens_per_s: float | None = None
    pace: Pace | None = None  # the same, in more detail: what ETAs are made of
    cold_start_seconds: float | None = None  # from the start of a worker's process to its first claim, as measured
    max_workers: int | None = None  # that this model's pool may come to; None: as many as run
    created_ms: int = 0
    v: int = VERSION


def weights_of(profile: str) -> str:
    """The weights digest in a numerics profile, which comes first: jobs are never continued across weights."""
    return profile.partition(";")[0]


def pack(record: Any) -> bytes:
    return msgspec.msgpack.encode(record)
