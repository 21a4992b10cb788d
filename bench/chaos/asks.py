"""What the clients ask for: a few dozen different jobs, so that undisturbed answers are known for thousands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.chaos.ledger import Ask

NUM_KINDS = 48


def mixed(count: int, *, max_tokens: int = 16) -> Iterator[Ask]:
    """Greedy and seeded, one choice and several, short and longer."""
    for number in range(count):
        kind = number % NUM_KINDS
        params: dict[str, Any] = {"max_tokens": max_tokens // 2 + kind % max_tokens}
        if kind % 3:
            params |= {"temperature": 1.0, "seed": kind}
        else:
            params |= {"temperature": 0.0}
        if kind % 7 == 3:
            params |= {"n": 2}
        yield f"{kind} the mill at the stream turns " + "and turns " * (kind % 5), params


def long(number: int, *, max_tokens: int = 400) -> Ask:
    """Runs for a second or two, so that something can happen to it."""
    return f"{number} a long story of the mill", {"temperature": 1.0, "seed": number, "max_tokens": max_tokens}
