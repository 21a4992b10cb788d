"""How many proposals of each sequence are worth verifying in this step: K, down to 0. Pure.

A step of N sequences that verifies m proposals takes t(N + m) seconds and, expected, gives N + g tokens, where g adds 1
for each certain proposal and rate^j for the j-th doubtful one of a sequence and those that it implies. The m most
likely proposals of the whole batch are verified, with the m for which tokens a second, (N + g) / t(N + m), is largest.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

_LEAST_GAIN = 0.02  # tokens; a proposal that is expected to give less is not weighed
_START_MARGIN = 1.04  # to begin, speculation must promise so many times the tokens a second of none; to go on, as many


class Offer(NamedTuple):
    """What could be verified of one sequence."""

    num_tokens: int
    rate: float  # of each doubtful one, given that those before it are right
    num_certain: int = 0
    num_doubtful: int = sys.maxsize  # behind the certain ones; those behind them are implied

    def gain(self, place: int) -> float:
        """Of the place-th token, from 1 on: how likely it is to be output."""
        return self.rate ** min(max(0, place - self.num_certain), self.num_doubtful)

    @property
    def gains(self) -> list[float]:
        return [self.gain(place) for place in range(1, self.num_tokens + 1)]


class DepthChooser:
    """Begins only with a margin and stops without one, so that it does not flicker around the break-even."""

    def __init__(self) -> None:
        self.is_on = False

    def choose(self, offers: list[Offer], most: int, seconds: list[float], seconds_per_depth: float) -> list[int]:
        """K for each sequence, at most `most` in all; as `best_depths` has it."""
        margin = 1.0 if self.is_on else _START_MARGIN
        depths = best_depths(offers, most, seconds, seconds_per_depth, margin=margin)
        if any(offer.num_tokens for offer in offers):
            self.is_on = any(depths)
        return depths


def best_depths(
    offers: list[Offer], most: int, seconds: list[float], seconds_per_depth: float, *, margin: float = 1.0
) -> list[int]:
    """K for each sequence, at most `most` in all; none where they do not give `margin` times the tokens a second.

    seconds[m]: of a step that verifies m proposals, as far as known; `seconds_per_depth`: what drafting takes for each
    proposal of the sequence that has the most of them. Where it takes any, each depth is weighed by itself.
    """
    gains = _gains(offers)
    deepest = max((place for _, place, _ in gains), default=0)
    best = len(offers) / seconds[0] * margin
    chosen: list[tuple[float, int, int]] = []
    for depth in range(1, deepest + 1) if seconds_per_depth else (deepest,):
        allowed = [gain for gain in gains if gain[1] <= depth][: min(most, len(seconds) - 1)]
        num_tokens, drafting = float(len(offers)), depth * seconds_per_depth
        for num_proposals, (gain, _, _) in enumerate(allowed, start=1):
            num_tokens += gain
            rate = num_tokens / (seconds[num_proposals] + drafting)
            if rate > best:
                best, chosen = rate, allowed[:num_proposals]
    depths = [0] * len(offers)
    for _, place, index in chosen:
        depths[index] = max(depths[index], place)
    return depths


def _gains(offers: list[Offer]) -> list[tuple[float, int, int]]:
    """(expected tokens, place, index of the sequence) of proposals, the likeliest first; a sequence's own in order."""
    gains = [
        (gain, place, index)
        for index, offer in enumerate(offers)
        for place, gain in enumerate(offer.gains, start=1)
        if gain >= _LEAST_GAIN
    ]
    return sorted(gains, key=lambda each: -each[0])
