"""From a plan to the flat tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.plan import RowShape
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


def build_batch(rows: Sequence[RowShape], block_size: int, device: torch.device) -> Batch:
    """Raises IndexError for a row whose block table does not cover its tokens."""
    num_tokens = [len(row.token_ids) for row in rows]
    ends = list(accumulate(num_tokens))
    paged = PagedRows(
        query_starts=[0, *ends],
        context_lens=[row.end for row in rows],
        block_tables=[row.block_table for row in rows],
        block_size=block_size,
    )
    return Batch(
        token_ids=_int64([token_id for row in rows for token_id in row.token_ids], device),
        positions=_int64([position for row in rows for position in range(row.start, row.end)], device),
        slots=_int64([slot for row in rows for slot in _slots(row, block_size)], device),
        logit_places=_int64(
            [place for row, end in zip(rows, ends, strict=True) for place in range(end - row.num_logits, end)], device
        ),
        rows=paged,
    )


def _slots(row: RowShape, block_size: int) -> Iterator[int]:
    """Plain numbers: most rows are decodes, whose one token is not worth an array."""
    table = row.block_table
    return (table[at // block_size] * block_size + at % block_size for at in range(row.start, row.end))


def _int64(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
