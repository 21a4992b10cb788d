"""From a plan to the flat tensors of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Row
from kernels.paged_attention.rows import PagedRows, RowTensors


@dataclass(frozen=True, slots=True)
class Batch:
    """All tokens of all rows one after another. T tokens, L wanted logits."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, within each sequence
    slots: torch.Tensor  # [T] int64, where each token's key and value go: block * block_size + offset
    logit_places: torch.Tensor  # [L] int64, into the T tokens: each row's last num_logits, row by row
    rows: PagedRows
    row_tensors: RowTensors | None = None  # in a graph: where the rows are read from; `rows` are then their bounds


def build_batch(rows: list[Row], block_size: int, device: torch.device) -> Batch:
    """Raises IndexError for a row whose block table does not cover its tokens."""
    num_tokens = [len(row.token_ids) for row in rows]
    ends = list(accumulate(num_tokens))
    paged = PagedRows(
        query_starts=[0, *ends],
        context_lens=[row.end for row in rows],
        block_tables=[row.block_table for row in rows],
        block_size=block_size,
    )
    positions = np.concatenate([np.arange(row.start, row.end) for row in rows])
    return Batch(
        token_ids=_int64([token_id for row in rows for token_id in row.token_ids], device),
        positions=_int64(positions, device),
        slots=_int64(np.concatenate([_slots(row, block_size) for row in rows]), device),
        logit_places=_int64(
            [place for row, end in zip(rows, ends, strict=True) for place in range(end - row.num_logits, end)], device
        ),
        rows=paged,
    )


def _slots(row: Row, block_size: int) -> npt.NDArray[np.int64]:
    positions = np.arange(row.start, row.end)
    return np.array(row.block_table)[positions // block_size] * block_size + positions % block_size


def _int64(values: list[int] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64).to(device)
