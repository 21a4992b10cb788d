"""The arrays that a captured decode step reads: one token a row, padded to a bucket with rows that do nothing.

row            0   1   2 | padding
slots          s0  s1  s2| -1        a token without a slot writes no key and no value
query_starts   0   1   2   3   3     a padding row has no query: it reads no key and writes no output
context_lens   c0  c1  c2| 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.cuda.buckets import Bucket
from engine.plan import RowShape


def decode_inputs(rows: Sequence[RowShape], bucket: Bucket, block_size: int) -> dict[str, npt.NDArray[Any]]:
    """`rows`: at most bucket.num_rows, of one token each, contexts of at most bucket.context_len.

    Raises IndexError for a row whose block table does not cover its token.
    """
    num_rows = bucket.num_rows
    arrays = empty_inputs(bucket, block_size)
    tables = arrays["block_tables"]
    for index, row in enumerate(rows):
        num_blocks = -(-row.end // block_size)
        if len(row.block_table) < num_blocks:
            raise IndexError(f"{len(row.block_table)} blocks do not hold position {row.start}")
        tables[index, :num_blocks] = row.block_table[:num_blocks]
        arrays["slots"][index] = row.block_table[row.start // block_size] * block_size + row.start % block_size
        arrays["token_ids"][index] = row.token_ids[0]
        arrays["positions"][index] = row.start
        arrays["context_lens"][index] = row.end
    arrays["query_starts"][:] = np.minimum(np.arange(num_rows + 1), len(rows))
    return arrays


def empty_inputs(bucket: Bucket, block_size: int) -> dict[str, npt.NDArray[Any]]:
    """All rows are padding; the shapes and their order are those of every upload for the bucket."""
    num_rows, num_blocks = bucket.num_rows, -(-bucket.context_len // block_size)
    return {
        "token_ids": np.zeros(num_rows, dtype=np.int64),
        "positions": np.zeros(num_rows, dtype=np.int64),
        "slots": np.full(num_rows, -1, dtype=np.int64),
        "query_starts": np.zeros(num_rows + 1, dtype=np.int32),
        "context_lens": np.zeros(num_rows, dtype=np.int32),
        "block_tables": np.zeros((num_rows, num_blocks), dtype=np.int32),
    }
