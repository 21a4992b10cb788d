"""The sizes that decode steps are captured in: a graph's shapes are fixed, so a smaller step is padded. Pure."""

from __future__ import annotations

from typing import NamedTuple

_FIRST_CONTEXT = 1024  # tokens
_CONTEXT_GROWTH = 4


class Bucket(NamedTuple):
    num_rows: int
    context_len: int  # tokens; no row's context is longer


class Buckets:
    """Rows: 1, 2, 4, 8, then steps of 8 up to 64 and of 32 beyond: so at most a third of a batch of 16 or more is
    padding. Contexts: 1,024, then four times as long each: they bound how many programs a row is split over.
    """

    def __init__(self, max_num_rows: int, max_context_len: int) -> None:
        self.num_rows = _row_sizes(max_num_rows)
        self.context_lens = _context_sizes(max_context_len)

    @property
    def largest(self) -> Bucket:
        return Bucket(self.num_rows[-1], self.context_lens[-1])

    def smallest_for(self, num_rows: int, context_len: int) -> Bucket | None:
        """None where the step is larger than any bucket."""
        rows = next((size for size in self.num_rows if size >= num_rows), None)
        context = next((size for size in self.context_lens if size >= context_len), None)
        return None if rows is None or context is None else Bucket(rows, context)


def _row_sizes(most: int) -> list[int]:
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, most + 32, 32)]
    return [size for size in sizes if size < most] + [most]


def _context_sizes(most: int) -> list[int]:
    sizes, size = [], _FIRST_CONTEXT
    while size < most:
        sizes.append(size)
        size *= _CONTEXT_GROWTH
    return [*sizes, most]
