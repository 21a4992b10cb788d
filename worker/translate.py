"""Between a job's words and the engine's: pure, both ways."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from engine import outputs, plan
from engine.errors import InvalidRequest
from engine.params import SamplingParams
from infra.contracts import ChoiceDelta, Job, JobError, JobSpec, Outcome, PositionLogprobs, TokenLogprob, weights_of
from infra.states import Status
from worker.progress import Progress

if TYPE_CHECKING:
    from engine.text.tokenizer import Tokenizer

TokenText = Callable[[int], str]


def params_of(spec: JobSpec, job_id: str) -> SamplingParams:
    """The job's parameters. Raises InvalidRequest.

    A seed that was not drawn at submit is made of the job's id, so that every attempt draws the same tokens.
    """
    params = SamplingParams.from_mapping(spec.params)
    if params.seed is None:
        digest = hashlib.sha256(job_id.encode()).digest()
        params = msgspec.structs.replace(params, seed=int.from_bytes(digest[:8], "big"))
    return params


def prompt_of(spec: JobSpec, tokenizer: Tokenizer, *, created_ms: int) -> list[int]:
    """The prompt's token ids. A template that prints the time gets the job's own, the same at every attempt.

    Raises InvalidRequest where the spec holds no prompt, or messages that the model's template refuses.
    """
    if spec.prompt_token_ids is not None:
        return spec.prompt_token_ids
    if spec.prompt is not None:
        return tokenizer.encode(spec.prompt)
    if spec.messages is None:
        raise InvalidRequest("input", "is missing; send messages, a prompt, or its token ids")
    if tokenizer.chat_template is None:
        raise InvalidRequest("messages", "cannot be used: this model has no chat template; send a prompt instead")
    text = tokenizer.chat_template.render(
        [msgspec.to_builtins(message) for message in spec.messages], now=datetime.fromtimestamp(created_ms / 1000, UTC)
    )
    return tokenizer.encode(text, add_special_tokens=False)


def position_logprobs(position: plan.PositionLogprobs, token_text: TokenText) -> PositionLogprobs:
    def one(entry: plan.TokenLogprob) -> TokenLogprob:
        return TokenLogprob(token_id=entry.token_id, token=token_text(entry.token_id), logprob=entry.logprob)

    return PositionLogprobs(chosen=one(position.chosen), top=[one(entry) for entry in position.top])


def choice_delta(delta: outputs.ChoiceDelta, token_text: TokenText) -> ChoiceDelta:
    logprobs = delta.logprobs
    return ChoiceDelta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=None if logprobs is None else [position_logprobs(position, token_text) for position in logprobs],
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        cumulative_logprob=delta.cumulative_logprob,
        score=delta.score,
    )


def timeline_of(timeline: outputs.Timeline | None) -> dict[str, float]:
    """The engine's timeline as the outcome keeps it: seconds and counts by name."""
    if timeline is None:
        return {}
    return {name: float(getattr(timeline, name)) for name in timeline.__dataclass_fields__}


def outcome_of(progress: Progress, *, timeline: dict[str, float], errors: dict[int, str]) -> Outcome:
    """The end of a job whose choices are all finished; failed if every one of them failed (`errors`, by choice)."""
    if errors and all(choice.finish_reason == "error" for choice in progress.choices):
        message = "; ".join(f"choice {index}: {errors[index]}" for index in sorted(errors))
        error = JobError(code="generation_error", message=message)
        return Outcome(
            status=Status.FAILED, result=progress.result, usage=progress.usage, error=error, timeline=timeline
        )
    return Outcome(status=Status.SUCCEEDED, result=progress.result, usage=progress.usage, timeline=timeline)


def failed_outcome(progress: Progress, error: JobError) -> Outcome:
    """The end of a job that cannot go on; what it had emitted stays in the result."""
    result = progress.result if progress.num_completion_tokens else None
    return Outcome(status=Status.FAILED, result=result, usage=progress.usage, error=error)


def is_foreign(job: Job, profile: str) -> bool:
    """Whether tokens of this job were, or may have been, emitted under other weights than those of `profile`."""
    return job.profile is not None and weights_of(job.profile) != weights_of(profile)
