"""Who goes next: weights, age, and what does not fit."""

from __future__ import annotations

from collections import Counter

import pytest

from infra.contracts import Tier
from infra.tiers import Head, Service

NOW = 1_000_000
PATIENCE = 10_000
I, S, B = Tier.INTERACTIVE, Tier.STANDARD, Tier.BULK  # noqa: E741


def heads(*tiers: Tier, arrived_ms: int = NOW, fits: bool = True) -> dict[Tier, Head]:
    return {tier: Head(arrived_ms, fits) for tier in tiers}


def choose(service: Service, waiting: dict[Tier, Head], now_ms: int = NOW) -> Tier | None:
    return service.choose(waiting, now_ms=now_ms, patience_ms=PATIENCE)


def serve_many(service: Service, waiting: dict[Tier, Head], num: int) -> Counter[Tier]:
    served: Counter[Tier] = Counter()
    for _ in range(num):
        tier = choose(service, waiting)
        assert tier is not None
        service.serve(tier, NOW)
        served[tier] += 1
    return served


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ((I, S, B), {I: 8, S: 4, B: 1}),
        ((I, B), {I: 8, B: 1}),
        ((S, B), {S: 4, B: 1}),
        ((I, S), {I: 2, S: 1}),
        ((B,), {B: 1}),
    ],
)
def test_service_follows_the_weights(waiting: tuple[Tier, ...], expected: dict[Tier, int]) -> None:
    num_rounds = 50
    served = serve_many(Service(), heads(*waiting), num_rounds * sum(expected.values()))
    for tier, weight in expected.items():
        assert abs(served[tier] - num_rounds * weight) <= 1


def test_nothing_waits_for_nothing() -> None:
    assert choose(Service(), {}) is None
    assert choose(Service(), heads(I, S, fits=False)) is None


def test_idling_saves_up_no_credit() -> None:
    service = Service()
    serve_many(service, heads(I), 1000)
    served = serve_many(service, heads(I, B), 18)
    assert served[B] <= 3


def test_equal_passes_go_by_age() -> None:
    waiting = {I: Head(NOW, True), B: Head(NOW - 1, True)}
    assert choose(Service(), waiting) is B


def test_a_head_past_its_patience_goes_first() -> None:
    service = Service()
    service.serve(B, NOW)  # so that bulk is far behind by weight
    later = NOW + 8 * PATIENCE
    assert choose(service, heads(I, B, arrived_ms=later - 1), later - 1) is I
    waiting = {I: Head(later, True), B: Head(NOW, True)}
    assert choose(service, waiting, later - 1) is I
    assert choose(service, waiting, later) is B


def test_patience_counts_from_the_tiers_last_service() -> None:
    """Ten thousand old jobs do not make a tier go first each time."""
    service = Service()
    waiting = {I: Head(NOW, True), B: Head(0, True)}
    service.serve(B, NOW)
    assert choose(service, waiting) is I


def test_what_stood_too_long_and_does_not_fit_holds_up_all() -> None:
    waiting = {I: Head(NOW, True), S: Head(NOW - 2 * PATIENCE, False)}
    assert choose(Service(), waiting, NOW - 1) is I
    assert choose(Service(), waiting, NOW) is None


def test_slow_service_does_not_level_the_weights() -> None:
    """Where every head is past its patience at each claim, higher tiers still get more."""
    service, now_ms = Service(), NOW
    served: Counter[Tier] = Counter()
    for _ in range(130):
        now_ms += 20 * PATIENCE
        tier = choose(service, {tier: Head(0, True) for tier in Tier}, now_ms)
        assert tier is not None
        service.serve(tier, now_ms)
        served[tier] += 1
    assert served[I] > served[S] > served[B] > 0
