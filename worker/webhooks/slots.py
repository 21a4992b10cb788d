"""Which endpoint may be tried now, so that a dead one holds nobody else."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from urllib.parse import urlsplit

MAX_WAITING = 1000  # messages that wait for a slot in this process; the others wait in the store
MAX_WAITING_EACH = 100  # of one endpoint
REFUSALS_PER_SECOND = 20.0  # of one crowded endpoint, spread out so that its crowd does not hide the others
MAX_PATIENCE_SECONDS = 60.0


def endpoint_of(url: str) -> str:
    """What shares a fate: the scheme, host and port of a URL; a URL that cannot be read stands for itself."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return f"{parts.scheme}://{parts.netloc.lower()}"


class Slots:
    """Tries under way. An endpoint has a quarter of all slots; one that failed last has a single slot."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError("webhook_concurrency must be at least 1")
        self._num_slots = num_slots
        self._under_way: Counter[str] = Counter()
        self._failed: set[str] = set()

    @property
    def num_under_way(self) -> int:
        return self._under_way.total()

    def try_take(self, endpoint: str) -> bool:
        """Takes a slot for one try; False where it has to wait."""
        its_slots = 1 if endpoint in self._failed else max(1, self._num_slots // 4)
        if self.num_under_way >= self._num_slots or self._under_way[endpoint] >= its_slots:
            return False
        self._under_way[endpoint] += 1
        return True

    def give_back(self, endpoint: str, *, answered: bool) -> None:
        """Ends a try. An endpoint that did not answer is held to one slot until it does."""
        self._under_way[endpoint] -= 1
        if not self._under_way[endpoint]:
            del self._under_way[endpoint]
        if answered:
            self._failed.discard(endpoint)
        else:
            self._failed.add(endpoint)


class WaitingRoom:
    """Hands slots on to who waits for them: per endpoint in the order of coming, a bounded number of each."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._num_waiting = 0
        self._refused: Counter[str] = Counter()  # since the endpoint last got a slot

    async def take(self, endpoint: str, *, timeout_seconds: float) -> bool:
        """Takes a slot, waiting for it at most so long; False where the room is full, or the wait was in vain."""
        if endpoint not in self._waiting and self._slots.try_take(endpoint):
            self._refused.pop(endpoint, None)
            return True
        queue = self._waiting.get(endpoint, ())
        if self._num_waiting >= MAX_WAITING or len(queue) >= MAX_WAITING_EACH:
            self._refused[endpoint] += 1
            return False
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(endpoint, deque()).append(turn)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_seconds):
                await turn
        except TimeoutError:
            if turn.cancelled():  # else the slot came at the last moment
                self._leave(endpoint, turn)
                self._refused[endpoint] += 1
                return False
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(endpoint, turn)
            else:  # the slot came, but nobody is there to use it
                self.give_back(endpoint, answered=True)
            raise
        self._refused.pop(endpoint, None)
        return True

    def give_back(self, endpoint: str, *, answered: bool) -> None:
        """Ends a try, and lets in who may come next."""
        self._slots.give_back(endpoint, answered=answered)
        for name in [endpoint, *(other for other in self._waiting if other != endpoint)]:
            while (turn := self._first(name)) is not None and self._slots.try_take(name):
                self._leave(name, turn)
                turn.set_result(None)

    def patience_seconds(self, endpoint: str) -> float:
        """After how long to ask again for a slot that was refused: the longer the crowd, the later."""
        return min(max(1.0, self._refused[endpoint] / REFUSALS_PER_SECOND), MAX_PATIENCE_SECONDS)

    def _first(self, endpoint: str) -> asyncio.Future[None] | None:
        """Who waits longest and still does: one that has just given up stands in the queue until it runs again."""
        return next((turn for turn in self._waiting.get(endpoint, ()) if not turn.done()), None)

    def _leave(self, endpoint: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting[endpoint]
        queue.remove(turn)
        self._num_waiting -= 1
        if not queue:
            del self._waiting[endpoint]
