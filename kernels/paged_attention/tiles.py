"""Which queries of a step attend together on a GPU.

For one key head, a row's queries and the `group_size` query heads that share the head form pairs, query by query:

    pair       0          1              group_size
    (query 0, head 0) (query 0, head 1) ... (query 1, head 0) ...

A tile is up to `tile_pairs` consecutive pairs of one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.paged_attention.rows import PagedRows

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tiles:
    """A list of tiles over some rows."""

    places: Int32s  # [tiles, 3]: row, first pair in the row, pairs in the tiles before it
    num_pairs: int  # of all tiles
    max_context_len: int  # of the rows that have tiles, 0 where there are none

    def __len__(self) -> int:
        return len(self.places)


def cut_tiles(rows: PagedRows, which: list[int], group_size: int, tile_pairs: int) -> Tiles:
    """The tiles of rows `which`."""
    places, num_pairs = [], 0
    for row in which:
        row_pairs = rows.num_queries(row) * group_size
        for first in range(0, row_pairs, tile_pairs):
            places.append((row, first, num_pairs))
            num_pairs += min(tile_pairs, row_pairs - first)
    return Tiles(
        places=np.array(places, dtype=np.int32).reshape(-1, 3),
        num_pairs=num_pairs,
        max_context_len=max((rows.context_lens[row] for row in which), default=0),
    )
