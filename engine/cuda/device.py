"""What the GPU runner asks of a device: streams, events, pinned memory, graphs. CudaDevice is the real one.

An operation is a function that starts work and does not wait for it. Streams work side by side; in one stream
operations follow each other. An event stands for all that its stream had been given when it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Event(Protocol):
    def is_done(self) -> bool: ...

    def wait(self) -> None:
        """The host waits."""


class Stream(Protocol):
    def run(self, operation: Callable[[], object]) -> None: ...

    def record(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """What this stream is given later begins after the event; the host goes on."""


class Graph(Protocol):
    output: torch.Tensor  # of the last replay; the next one writes over it

    def replay(self) -> None:
        """The captured kernels once more, on the main stream, reading the same memory."""


class Device(Protocol):
    torch_device: torch.device
    main: Stream  # what torch's own calls go to

    def new_stream(self) -> Stream: ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of host memory that copies to and from the device can run beside the host."""

    def capture(self, body: Callable[[], torch.Tensor]) -> Graph:
        """The kernels of `body` as a graph. `body` runs for real first: it compiles, and may be repeated."""


class CudaDevice:
    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.main: Stream = _CudaStream(torch.cuda.current_stream(torch_device))
        self._graph_pool: Any = None  # memory that all graphs share: only one of them runs at a time

    def new_stream(self) -> Stream:
        return _CudaStream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, body: Callable[[], torch.Tensor]) -> Graph:
        body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            output = body()
        self._graph_pool = graph.pool()
        return _CudaGraph(graph, output)


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, operation: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            operation()

    def record(self) -> Event:
        event = _CudaEvent(torch.cuda.Event())  # type: ignore[no-untyped-call]
        event.event.record(self._stream)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()
