"""Messages over a pipe: four bytes of length, then so many bytes."""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct("<I")


def write_frame(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(_LENGTH.pack(len(payload)) + payload)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """None where the other side is gone."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    payload = pipe.read(length)
    return payload if len(payload) == length else None
