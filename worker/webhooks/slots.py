"""Which endpoint may be tried now, so that a dead one holds nobody else. Pure."""

from __future__ import annotations

from collections import Counter
from urllib.parse import urlsplit

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
            raise ValueError("at least one webhook must be allowed at a time")
        self._num_slots = num_slots
        self._under_way: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._refused: Counter[str] = Counter()  # since the endpoint last got a slot

    @property
    def num_under_way(self) -> int:
        return self._under_way.total()

    def try_take(self, endpoint: str) -> bool:
        """Takes a slot for one try; False where it has to wait."""
        its_slots = 1 if endpoint in self._failed else max(1, self._num_slots // 4)
        if self.num_under_way >= self._num_slots or self._under_way[endpoint] >= its_slots:
            self._refused[endpoint] += 1
            return False
        self._under_way[endpoint] += 1
        self._refused.pop(endpoint, None)
        return True

    def patience_seconds(self, endpoint: str) -> float:
        """After how long to ask again for a slot that was refused: the longer the crowd, the later."""
        return min(max(1.0, self._refused[endpoint] / REFUSALS_PER_SECOND), MAX_PATIENCE_SECONDS)

    def give_back(self, endpoint: str, *, answered: bool) -> None:
        """Ends a try. An endpoint that did not answer is held to one slot until it does."""
        self._under_way[endpoint] -= 1
        if not self._under_way[endpoint]:
            del self._under_way[endpoint]
        if answered:
            self._failed.discard(endpoint)
        else:
            self._failed.add(endpoint)
