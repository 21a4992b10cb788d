"""The device's twin without a GPU: its streams put everything off until somebody waits for it.

    main     works at once, as torch does on a CPU
    others   an operation runs when an event after it is waited for, and not before: the latest that a GPU may take

So whoever forgets to wait reads old memory every time, where a GPU would only sometimes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from engine.cuda.device import Event, Graph, Stream


class LateDevice:
    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.main: Stream = _PromptStream()

    def new_stream(self) -> LateStream:
        return LateStream()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def capture(self, body: Callable[[], torch.Tensor]) -> Graph:
        return _Replayed(body)


class LateStream:
    def __init__(self) -> None:
        self._pending: deque[Callable[[], object]] = deque()
        self._num_given = 0
        self._num_done = 0

    def run(self, operation: Callable[[], object]) -> None:
        self._pending.append(operation)
        self._num_given += 1

    def record(self) -> Event:
        return _LateEvent(self, self._num_given)

    def wait(self, event: Event) -> None:
        self.run(event.wait)

    def has_done(self, count: int) -> bool:
        """Whether the first `count` operations are done."""
        return self._num_done >= count

    def catch_up(self, count: int) -> None:
        """Does the first `count` operations, as far as they are not done."""
        while self._num_done < count:
            self._pending.popleft()()
            self._num_done += 1


class _LateEvent:
    def __init__(self, stream: LateStream, count: int) -> None:
        self._stream = stream
        self._count = count

    def is_done(self) -> bool:
        return self._stream.has_done(self._count)

    def wait(self) -> None:
        self._stream.catch_up(self._count)


class _PromptStream:
    def run(self, operation: Callable[[], object]) -> None:
        operation()

    def record(self) -> Event:
        return _DoneEvent()

    def wait(self, event: Event) -> None:
        event.wait()


class _DoneEvent:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Replayed:
    def __init__(self, body: Callable[[], torch.Tensor]) -> None:
        self._body = body
        self.output = body().clone()

    def replay(self) -> None:
        self.output.copy_(self._body())
