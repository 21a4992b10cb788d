"""Who goes first: each policy turns a request into one number at its arrival, and lower goes first. Pure.

The number never changes, so a heap of waiting requests ages by itself: whatever waits long enough is passed by every
later arrival's number, and nothing starves. Victims of preemption are taken in the reverse order.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.sequence import Request

NO_DEADLINE_SECONDS = 600.0  # a request without a deadline is ordered as if it had this long
DEADLINE_MARGIN_SECONDS = 1.0  # running work is not disturbed for less
MAX_TENANTS_REMEMBERED = 1024


class Policy(Protocol):
    preempts: bool  # whether `may_preempt` is ever true

    def key(self, request: Request) -> float:
        """The request's number; called once, at its arrival."""
        ...

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether the one may take the other's seat or blocks while it runs; only ever true of a lower number."""
        ...

    def started(self, request: Request) -> None: ...

    def finished(self, request: Request) -> None: ...


class _Stateless:
    preempts = True

    def started(self, request: Request) -> None:
        pass

    def finished(self, request: Request) -> None:
        pass


class FirstCome(_Stateless):
    """In order of arrival."""

    preempts = False

    def key(self, request: Request) -> float:
        return request.arrival

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return False


class ByPriority(_Stateless):
    """Lower priority first; so many seconds of waiting outweigh one level."""

    def __init__(self, seconds_per_level: float) -> None:
        self._seconds_per_level = seconds_per_level

    def key(self, request: Request) -> float:
        return request.arrival + self._seconds_per_level * request.params.priority

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.params.priority < running.params.priority and waiting.key < running.key


class ByDeadline(_Stateless):
    """Earliest deadline first."""

    def key(self, request: Request) -> float:
        if request.deadline is None:
            return request.arrival + NO_DEADLINE_SECONDS
        return max(request.deadline, request.arrival)  # a deadline in the past wins nothing over one that is now

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return waiting.deadline is not None and waiting.key + DEADLINE_MARGIN_SECONDS < running.key


class FairShare:
    """Tenants take turns by tokens: a request starts where its tenant's counter of tokens stands.

    Virtual time runs at the pace of one tenant's share: a started request moves it by its tokens over the number of
    tenants that wait. A tenant that was idle is lifted to it, so it gets its share and no arrears.
    Tokens are estimated at arrival and corrected at the end to what was computed.
    """

    preempts = False

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}  # tenant -> where its next request starts
        self._num_waiting: Counter[str] = Counter()  # tenant -> requests that have not started
        self._virtual_tokens = 0.0

    def key(self, request: Request) -> float:
        start = max(self._counters.get(request.tenant, 0.0), self._virtual_tokens)
        if len(self._counters) >= MAX_TENANTS_REMEMBERED:
            self._counters = {t: count for t, count in self._counters.items() if count > self._virtual_tokens}
        self._counters[request.tenant] = start + _estimated_tokens(request)
        self._num_waiting[request.tenant] += 1
        return start

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return False

    def started(self, request: Request) -> None:
        share = _estimated_tokens(request) / len(self._num_waiting)
        self._virtual_tokens = max(self._virtual_tokens, request.key) + share
        self._waits_less(request.tenant)

    def finished(self, request: Request) -> None:
        if request.first_scheduled is None:
            self._waits_less(request.tenant)
        if request.tenant in self._counters:
            num_outputs = sum(sequence.num_output_tokens for sequence in request.sequences)
            num_tokens = 0 if request.first_scheduled is None else request.num_prompt_tokens + num_outputs
            self._counters[request.tenant] += num_tokens - _estimated_tokens(request)

    def _waits_less(self, tenant: str) -> None:
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]


def make_policy(config: EngineConfig) -> Policy:
    policies: dict[str, Policy] = {
        "fcfs": FirstCome(),
        "priority": ByPriority(config.priority_seconds),
        "deadline": ByDeadline(),
        "fair": FairShare(),
    }
    return policies[config.scheduling_policy]


def _estimated_tokens(request: Request) -> int:
    return request.num_prompt_tokens + request.params.num_sequences * (request.params.max_tokens or 0)
