"""Many small requests over one connection, each sent before the answers to those before it have come."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

AT_ONCE = 64


async def ask_many(base_url: str, method: str, paths: Sequence[str]) -> Counter[int]:
    """How often each status was answered. Raises OSError or IncompleteReadError where the connection breaks."""
    address = urlsplit(base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    found: Counter[int] = Counter()
    try:
        for start in range(0, len(paths), AT_ONCE):
            some = paths[start : start + AT_ONCE]
            for path in some:
                writer.write(
                    f"{method} {path} HTTP/1.1\r\nhost: {address.netloc}\r\ncontent-length: 0\r\n\r\n".encode()
                )
            await writer.drain()
            for _ in some:
                found[await _status(reader)] += 1
    finally:
        writer.close()
    return found


async def _status(reader: asyncio.StreamReader) -> int:
    """Of the next answer, which is read to its end."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    await reader.readexactly(int(headers.get("content-length", "0")))
    return int(lines[0].split(" ")[1])
