"""Names and attributes of spans, by OpenTelemetry's conventions for GenAI and messaging. Pure.

Only names, counts and times go in here: no text of prompts, answers or errors' messages.
"""

from __future__ import annotations

from infra.contracts import Job, JobSpec, Kind, Outcome
from infra.telemetry import Attributes, AttributeValue

_OPERATIONS = {Kind.CHAT: "chat", Kind.GENERATE: "text_completion"}
_REQUEST_PARAMS = {"max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed"}
_LATENCIES = {
    "queued_seconds": "gen_ai.latency.time_in_queue",
    "prefill_seconds": "gen_ai.latency.time_in_model_prefill",
    "decode_seconds": "gen_ai.latency.time_in_model_decode",
}


def request_name(spec: JobSpec) -> str:
    """Of the gateway's span: `chat smollm2-135m`."""
    return f"{_OPERATIONS[spec.kind]} {spec.model}"


def process_name(job: Job) -> str:
    """Of a worker's span, one per attempt."""
    return f"process {job.spec.model}"


def request_attributes(spec: JobSpec) -> Attributes:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _OPERATIONS[spec.kind],
        "gen_ai.provider.name": "millstream",
        "gen_ai.request.model": spec.model,
    }
    for name in _REQUEST_PARAMS & spec.params.keys():
        value = spec.params[name]
        if isinstance(value, int | float):
            attributes[f"gen_ai.request.{name}"] = value
    return attributes


def job_attributes(job: Job) -> Attributes:
    """Of anything that is about one attempt of a job."""
    return {
        **request_attributes(job.spec),
        "gen_ai.response.id": job.id,
        "messaging.system": "millstream",
        "messaging.destination.name": f"lane-{job.lane}-{job.tier}",
        "messaging.message.id": job.id,
        "messaging.operation.type": "process",
        "millstream.attempt": job.attempt,
        "millstream.lost_count": job.lost_count,
    }


def outcome_attributes(outcome: Outcome) -> Attributes:
    """Of the span in which a job ended."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": outcome.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": outcome.usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.usage.cached_tokens,
    }
    if outcome.result is not None:
        reasons = [choice.finish_reason or "none" for choice in outcome.result.choices]
        attributes["gen_ai.response.finish_reasons"] = reasons
    if outcome.error is not None:
        attributes["error.type"] = outcome.error.code
    for name, conventional in _LATENCIES.items():
        if name in outcome.timeline:
            attributes[conventional] = outcome.timeline[name]
    return attributes
