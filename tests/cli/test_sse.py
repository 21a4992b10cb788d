"""Events come out whole, wherever the bytes were cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from millstream.client.sse import ServerSentEvent, SseParser

STREAM = (
    ": keepalive\n\n"
    "id: 0\nevent: job.queued\ndata: {}\n\n"
    'id: 1\r\nevent: job.delta\r\ndata: {"text": "naïve 日本 😀"}\r\n\r\n'
    "event: dropped without data\n\n"
    "data:first\ndata:  second\nretry: 5\nunknown: x\n\n"
    "id: 3\nevent: job.succeeded\ndata: cut off"
).encode()

EVENTS = [
    ServerSentEvent("job.queued", "{}", "0"),
    ServerSentEvent("job.delta", '{"text": "naïve 日本 😀"}', "1"),
    ServerSentEvent("message", "first\n second", "1"),  # an id stays until another comes
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_wherever_it_is_cut(cuts: list[int]) -> None:
    places = sorted({0, len(STREAM), *cuts})
    parser = SseParser()
    events = [event for a, b in itertools.pairwise(places) for event in parser.feed(STREAM[a:b])]
    assert events == EVENTS


def test_the_cut_off_event_comes_once_it_is_whole() -> None:
    parser = SseParser()
    parser.feed(STREAM)
    assert parser.feed(b" no more\n") == []
    assert parser.feed(b"\n") == [ServerSentEvent("job.succeeded", "cut off no more", "3")]
