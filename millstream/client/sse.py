"""Server-sent events, read from bytes as they come (WHATWG HTML, "Server-sent events"). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    event: str
    data: str
    id: str | None


@dataclass(slots=True)
class SseParser:
    """Give it bytes cut anywhere; it gives whole events. What lies behind the last blank line is not one yet."""

    _buffer: bytes = b""
    _event: str = ""
    _data: list[str] = field(default_factory=list)
    _id: str | None = None

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that `chunk` completes. Lines end with LF or CRLF; a line is decoded when it is whole."""
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            if line:
                self._field(line)
            elif self._data:
                events.append(ServerSentEvent(self._event or "message", "\n".join(self._data), self._id))
                self._event, self._data = "", []
            else:
                self._event = ""
        return events

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
            case "id":
                self._id = value
            case _:  # a comment (empty name), `retry`, or a name of the future: all to be ignored
                pass
