"""Which queries of a flat batch read which blocks of the pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Row i's queries are query_starts[i] .. query_starts[i + 1] of the flat batch, in the order of their positions.

    position 0 ................................. context_lens[i]
             | keys in the pool      | row's queries |
    block_tables[i][j] holds positions j * block_size .. (j + 1) * block_size; entries beyond the context are unused
    """

    query_starts: list[int]  # one more than there are rows
    context_lens: list[int]
    block_tables: list[list[int]]
    block_size: int

    def __len__(self) -> int:
        return len(self.context_lens)

    def num_queries(self, row: int) -> int:
        return self.query_starts[row + 1] - self.query_starts[row]
