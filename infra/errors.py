"""Errors by cause. Each says whose fault it is (`status`, as HTTP counts it), and whether trying again can help."""

from __future__ import annotations


class MillstreamError(Exception):
    """Something went wrong inside Millstream."""

    status = 500
    code = "internal_error"
    retryable = False

    def __init__(self, message: str | None = None, *, param: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").splitlines()[0])
        self.param = param

    @property
    def message(self) -> str:
        return str(self.args[0])


class BadRequest(MillstreamError):
    """A field is malformed or out of range."""

    status = 400
    code = "invalid_request"


class ContextTooLong(BadRequest):
    """The prompt and the tokens asked for do not fit the model's context."""

    code = "context_length_exceeded"


class UnknownModel(MillstreamError):
    """No model of that name is served here; `GET /v1/models` lists those that are."""

    status = 404
    code = "model_not_found"


class UnknownJob(MillstreamError):
    """No job of that id: it never was, or its record has expired."""

    status = 404
    code = "job_not_found"


class UnknownLane(MillstreamError):
    """There is no lane of that number; `millstream lanes` lists those that there are."""

    status = 404
    code = "lane_not_found"


class EventsGone(MillstreamError):
    """The event log of this job has expired; read its result instead."""

    status = 410
    code = "events_gone"


class Conflict(MillstreamError):
    """The job is not in a state that allows this."""

    status = 409
    code = "conflict"


class IdempotencyMismatch(MillstreamError):
    """This Idempotency-Key was used with another body; use a new key, or send the first body again."""

    status = 422
    code = "idempotency_key_reused"


class QueueFull(MillstreamError):
    """As many jobs are waiting as this queue takes; try again when some have been worked off."""

    status = 429
    code = "queue_full"
    retryable = True


class SuspectWaits(MillstreamError):
    """A job that may kill workers waits for one that runs nothing: let what runs end, and claim again then."""

    status = 409
    code = "suspect_waits"
    retryable = True


class StoreUnavailable(MillstreamError):
    """The store refuses writes or cannot be reached; nothing was recorded, try again shortly."""

    status = 503
    code = "store_unavailable"
    retryable = True


class UnknownBlob(MillstreamError):
    """No blob of that name: it never was, or it has been deleted."""

    status = 404
    code = "blob_not_found"


class BlobUnavailable(MillstreamError):
    """The blob store cannot be reached or refuses this; try again shortly."""

    status = 503
    code = "blobs_unavailable"
    retryable = True


class StoreUnsuitable(MillstreamError):
    """The Redis or Valkey server cannot keep Millstream's promises as it is configured."""

    code = "store_unsuitable"
