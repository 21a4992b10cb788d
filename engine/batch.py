"""From a plan to the flat tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from engine.plan import RowShape
from kernels.paged_attention.rows import PagedRows, RowTensors

_NUMPY = {torch.int32: np.int32, torch.int64: np.int64}


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of all rows one after another. T tokens, L wanted logits."""

    token_ids: torch.Tensor  # [T]; like those below int64, or int32 for a decoder that wants it
    positions: torch.Tensor  # [T], within each sequence
    slots: torch.Tensor  # [T], where each token's key and value go: block * block_size + offset
    logit_places: torch.Tensor  # [L], into the T tokens: each row's last num_logits, row by row
    rows: PagedRows
    row_tensors: RowTensors | None = None  # in a graph: where the rows are read from; `rows` are then their bounds


def build_batch(
    rows: Sequence[RowShape], block_size: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> Batch:
    """dtype: of the tensors. Raises IndexError for a row whose block table does not cover its tokens."""

    def tensor(values: list[int]) -> torch.Tensor:
        if (
            device.type == "cpu"
        ):  # by numpy: in a decode step of one sequence, torch's own way takes longer than the rest here
            return torch.from_numpy(np.array(values, dtype=_NUMPY[dtype]))
        return torch.tensor(values, dtype=dtype, device=device)

    num_tokens = [len(row.token_ids) for row in rows]
    ends = list(accumulate(num_tokens))
    paged = PagedRows(
        query_starts=[0, *ends],
        context_lens=[row.end for row in rows],
        block_tables=[row.block_table for row in rows],
        block_size=block_size,
    )
    return Batch(
        token_ids=tensor([token_id for row in rows for token_id in row.token_ids]),
        positions=tensor([position for row in rows for position in range(row.start, row.end)]),
        slots=tensor([slot for row in rows for slot in _slots(row, block_size)]),
        logit_places=tensor(
            [place for row, end in zip(rows, ends, strict=True) for place in range(end - row.num_logits, end)]
        ),
        rows=paged,
    )


def _slots(row: RowShape, block_size: int) -> Iterator[int]:
    """Plain numbers: most rows are decodes, whose one token is not worth an array."""
    table = row.block_table
    return (table[at // block_size] * block_size + at % block_size for at in range(row.start, row.end))
