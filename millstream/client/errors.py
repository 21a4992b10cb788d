"""What a client's call can raise."""

from __future__ import annotations

from infra.errors import MillstreamError


class ClientError(MillstreamError):
    """A call to the gateway failed."""


class CannotConnect(ClientError):
    """The gateway cannot be reached; is it running? Start one with `millstream up`, or name another with --url."""

    retryable = True


class ApiError(ClientError):
    """The gateway answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code or "unknown_error"
        self.request_id = request_id


class BrokenStream(ClientError):
    """The event stream broke again and again; nothing was lost: stream again from the last event."""

    retryable = True


class WaitedTooLong(ClientError):
    """It has not ended within the time given; it goes on, and can be waited for again."""


class NotSucceeded(ClientError):
    """The job or run ended without a result."""


class ClientClosed(ClientError):
    """This client has been closed; open another."""
