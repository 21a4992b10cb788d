"""How many proposals of each sequence are worth verifying in this step: K, down to 0. Pure.

A step of N sequences that verifies m proposals takes t(N + m) seconds and, expected, gives N + g tokens, where g adds
up how likely each of them is to be output. The m most likely proposals of the whole batch are verified, with the m for
which tokens a second, (N + g) / t(N + m), is largest.
"""

from __future__ import annotations

_LEAST_GAIN = 0.02  # tokens; a proposal that is expected to give less is not weighed
_START_MARGIN = 1.04  # to begin, speculation must promise so many times the tokens a second of none; to go on, as many

Gains = list[float]  # of one sequence: how likely each proposal that could be verified is to be output; descending


class DepthChooser:
    """Begins only with a margin and stops without one, so that it does not flicker around the break-even."""

    def __init__(self) -> None:
        self.is_on = False

    def choose(self, offers: list[Gains], most: int, seconds: list[float], seconds_per_depth: float) -> list[int]:
        """K for each sequence, at most `most` in all; as `best_depths` has it."""
        margin = 1.0 if self.is_on else _START_MARGIN
        depths = best_depths(offers, most, seconds, seconds_per_depth, margin=margin)
        if any(offers):
            self.is_on = any(depths)
        return depths


def best_depths(
    offers: list[Gains], most: int, seconds: list[float], seconds_per_depth: float, *, margin: float = 1.0
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


def _gains(offers: list[Gains]) -> list[tuple[float, int, int]]:
    """(expected tokens, place, index of the sequence) of proposals, the likeliest first; a sequence's own in order."""
    gains = [
        (gain, place, index)
        for index, offer in enumerate(offers)
        for place, gain in enumerate(offer, start=1)
        if gain >= _LEAST_GAIN
    ]
    return sorted(gains, key=lambda each: -each[0])
