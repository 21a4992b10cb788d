"""Which queries of a flat batch read which blocks of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The same rows as tensors, which a captured graph reads anew at every replay; int32, on the device.

    They say what the rows are; the PagedRows beside them only bound them: no row is longer, and there are no more. A
    row without queries, query_starts[i] == query_starts[i + 1], only fills up: it reads and writes nothing.
    """

    query_starts: torch.Tensor  # [rows + 1]
    context_lens: torch.Tensor  # [rows]
    block_tables: torch.Tensor  # [rows, blocks]
