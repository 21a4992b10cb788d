"""What a step of decoding costs by how many tokens it computes, measured while it runs. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

_WEIGHT = 0.2  # of the newest measurement in a moving average
_MOST_GROWTH = 2.0  # a measurement counts as at most so many times the average: a hiccup is no cost
_HOPEFUL_SHARE = 0.5  # of the slope so far
_LEAST_SECONDS = 1e-9  # a clock may stand still
_STALE_AFTER = 512  # steps; what was measured longer ago may be measured anew


@dataclass(slots=True)
class _Point:
    num_tokens: float
    seconds: float
    step: int  # when it was measured last


class DecodeCurve:
    """Seconds of a step without prefill, by tokens computed; one curve for each doubling of sequences."""

    def __init__(self) -> None:
        self._points: dict[int, dict[int, _Point]] = {}
        self._step = 0

    def observe(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens for so many sequences."""
        self._step += 1
        points = self._points.setdefault(num_sequences.bit_length(), {})
        seconds = max(seconds, _LEAST_SECONDS)
        point = points.get(_bucket(num_tokens))
        if point is None:
            points[_bucket(num_tokens)] = _Point(num_tokens, seconds, self._step)
            return
        point.seconds += _WEIGHT * (min(seconds, _MOST_GROWTH * point.seconds) - point.seconds)
        point.num_tokens += _WEIGHT * (num_tokens - point.num_tokens)
        point.step = self._step

    def estimates(
        self, num_sequences: int, most_tokens: int, seconds_per_prefill_token: float | None = None
    ) -> list[float]:
        """Seconds of steps of num_sequences .. most_tokens tokens; fewer where that is too far from what is known.

        Between two measurements the cost is linear. Beyond the last a token takes as long as one of prefill, if that
        is no more than so far: both are rows of one product. Otherwise the cost is hoped to rise half as steeply as
        so far, and only a few tokens further each time, so that trying it costs little.
        """
        points = self._points.get(num_sequences.bit_length(), {})
        for bucket in [bucket for bucket, point in points.items() if self._step - point.step > _STALE_AFTER]:
            del points[bucket]
        known = sorted(points.values(), key=lambda point: point.num_tokens)
        if not known:
            return []
        places = [point.num_tokens for point in known]
        slope = _slope(known)
        if seconds_per_prefill_token is not None and seconds_per_prefill_token <= slope:
            slope = seconds_per_prefill_token
        else:
            slope *= _HOPEFUL_SHARE
            most_tokens = min(most_tokens, int(places[-1]) + max(2, num_sequences // 4))
        return [
            _interpolated(known, bisect_left(places, num_tokens), num_tokens, slope)
            for num_tokens in range(num_sequences, most_tokens + 1)
        ]


def _slope(known: list[_Point]) -> float:
    """Seconds for each token more: over all that is known, or between its last two points where that is steeper.

    Of a single point, as if half of it were fixed.
    """
    last = known[-1]
    if len(known) == 1:
        return last.seconds / last.num_tokens / 2
    slopes = [(last.seconds - each.seconds) / (last.num_tokens - each.num_tokens) for each in (known[0], known[-2])]
    return max(0.0, *slopes)


def _interpolated(known: list[_Point], index: int, num_tokens: int, slope: float) -> float:
    """`index`: of the first known point that is no smaller."""
    if index == 0:
        return known[0].seconds
    left = known[index - 1]
    if index == len(known):
        return left.seconds + (num_tokens - left.num_tokens) * slope
    right = known[index]
    share = (num_tokens - left.num_tokens) / (right.num_tokens - left.num_tokens)
    return left.seconds + share * (right.seconds - left.seconds)


def _bucket(num_tokens: int) -> int:
    """Each number up to 16 by itself, then eight to a doubling."""
    shift = max(0, num_tokens.bit_length() - 4)
    return num_tokens >> shift << shift
