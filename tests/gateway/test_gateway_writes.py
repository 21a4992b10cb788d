"""What is written within one turn of the loop goes out at once, in order, and is never kept back longer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from api_gateway.writes import MAX_HELD_BYTES, GatheringTransport


class Written(asyncio.Transport):
    """Keeps what each call wrote, until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[bytes] = []
        self.is_closed = False

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        assert not self.is_closed
        self.calls.append(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def turn() -> None:
    await asyncio.sleep(0)


def gathering() -> tuple[GatheringTransport, Written]:
    written = Written()
    return GatheringTransport(written, asyncio.get_running_loop()), written


async def test_head_and_body_go_out_together() -> None:
    transport, written = gathering()
    transport.write(b"head")
    transport.write(b"body")
    await turn()
    assert written.calls == [b"headbody"]


async def test_each_turn_s_part_of_a_stream_goes_out_by_itself() -> None:
    transport, written = gathering()
    for part in (b"one", b"two", b"three"):
        transport.write(part)
        await turn()
    assert written.calls == [b"one", b"two", b"three"]


async def test_much_is_not_held_at_all() -> None:
    transport, written = gathering()
    transport.write(b"head")
    transport.write(b"x" * MAX_HELD_BYTES)
    assert written.calls == [b"head" + b"x" * MAX_HELD_BYTES]
    transport.write(b"rest")
    await turn()
    assert written.calls[1:] == [b"rest"]


async def test_what_is_held_goes_out_before_the_end() -> None:
    transport, written = gathering()
    transport.write(b"bye")
    transport.close()
    assert written.calls == [b"bye"] and written.is_closed
    await turn()
    assert written.calls == [b"bye"]


async def test_a_client_that_has_gone_is_written_nothing() -> None:
    transport, written = gathering()
    transport.write(b"late")
    written.close()
    await turn()
    assert not written.calls
