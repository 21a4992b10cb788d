"""Paged attention from torch's own operators: copies each row's keys and values together, then attends densely.

All decode rows of similar length attend at once, padded; each prefill row by itself. What depends on the rows alone
is prepared once per step and used by every layer.

A padded place reads the row's own first key under a mask, never a stranger's slot: so a sequence whose cache went to
NaN cannot reach another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kernels.paged_attention.rows import PagedRows, RowTensors

_PADDING_RATIO = 1.3  # decode rows share a group while the longest is at most this much longer than the shortest
_MIN_PADDED = 128  # lengths up to here always share one: a call costs more than the padding


@dataclass(frozen=True, slots=True)
class _Segment:
    """Queries that attend together: `num_rows` rows of `num_queries` each."""

    queries: slice | torch.Tensor  # their places in the flat batch, row by row
    slots: torch.Tensor  # [num_rows * context_len], int64
    mask: torch.Tensor | None  # [num_rows, 1, num_queries, context_len], bool, True where a key is seen; None: all
    num_rows: int
    num_queries: int
    context_len: int


class GatheredAttention:
    """Attention for the rows of one step, under one window. Its shapes follow the rows, so no graph can hold it."""

    def __init__(
        self, rows: PagedRows, device: torch.device, window: int | None, tensors: RowTensors | None = None
    ) -> None:
        if tensors is not None:
            raise ValueError("torch's attention cannot read its rows from tensors; graphs need Triton's")
        decodes = [row for row in range(len(rows)) if rows.num_queries(row) == 1]
        self._segments = [_decode_segment(rows, group, window, device) for group in _by_length(rows, decodes)]
        self._segments += [
            _prefill_segment(rows, row, window, device) for row in range(len(rows)) if rows.num_queries(row) > 1
        ]

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """query: [tokens, heads, head_dim]; pools: [blocks, block_size, kv_heads, head_dim]. Returns query's shape."""
        output = torch.empty_like(query)
        for segment in self._segments:
            shape = (segment.num_rows, segment.num_queries, *query.shape[1:])
            wanted = query[segment.queries].view(shape).transpose(1, 2)
            keys = _gather(key_pool, segment).to(query.dtype)
            values = _gather(value_pool, segment).to(query.dtype)
            if softcap is None:
                attended = F.scaled_dot_product_attention(
                    wanted, keys, values, attn_mask=segment.mask, scale=scale, enable_gqa=True
                )
            else:
                attended = _attend_softcapped(wanted, keys, values, segment.mask, scale, softcap)
            output[segment.queries] = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
        return output


def _gather(pool: torch.Tensor, segment: _Segment) -> torch.Tensor:
    """[num_rows, kv_heads, context_len, head_dim]; one whole-row copy per slot is what torch does fastest."""
    kv_heads, head_dim = pool.shape[2:]
    picked = pool.view(-1, kv_heads * head_dim).index_select(0, segment.slots)
    return picked.view(segment.num_rows, segment.context_len, kv_heads, head_dim).transpose(1, 2)


def _attend_softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """The same by hand, since torch's fused operator cannot cap scores. Shapes: [rows, heads, positions, head_dim]."""
    num_rows, num_heads, num_queries, head_dim = query.shape
    grouped = query.reshape(num_rows, keys.shape[1], -1, head_dim)  # a group's queries, head by head, on one key head
    score = torch.matmul(grouped, keys.transpose(2, 3)).view(num_rows, num_heads, num_queries, -1) * scale
    score = softcap * torch.tanh(score / softcap)
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf)
    weight = score.softmax(-1, dtype=torch.float32).to(values.dtype)
    attended = torch.matmul(weight.view(num_rows, keys.shape[1], -1, keys.shape[2]), values)
    return attended.view(query.shape)


def _by_length(rows: PagedRows, decodes: list[int]) -> list[list[int]]:
    """Decode rows in groups of similar context length."""
    groups: list[list[int]] = []
    limit = 0.0
    for row in sorted(decodes, key=lambda row: rows.context_lens[row]):
        if not groups or rows.context_lens[row] > limit:
            groups.append([])
            limit = max(rows.context_lens[row] * _PADDING_RATIO, _MIN_PADDED)
        groups[-1].append(row)
    return groups


def _decode_segment(rows: PagedRows, group: list[int], window: int | None, device: torch.device) -> _Segment:
    lens = np.array([rows.context_lens[row] for row in group])
    starts = np.maximum(lens - window, 0) if window else np.zeros_like(lens)
    num_seen = lens - starts
    context_len = int(num_seen.max())
    place = np.arange(context_len)[None, :]
    seen = place < num_seen[:, None]
    positions = np.where(seen, starts[:, None] + place, starts[:, None])
    tables = [rows.block_tables[row] for row in group]
    return _Segment(
        queries=_int64([rows.query_starts[row] for row in group], device),
        slots=_int64(slots_of(tables, positions, rows.block_size).reshape(-1), device),
        mask=None if seen.all() else torch.from_numpy(seen).to(device)[:, None, None, :],
        num_rows=len(group),
        num_queries=1,
        context_len=context_len,
    )


def _prefill_segment(rows: PagedRows, row: int, window: int | None, device: torch.device) -> _Segment:
    num_queries, end = rows.num_queries(row), rows.context_lens[row]
    first_query = end - num_queries
    start = max(first_query - window + 1, 0) if window else 0
    positions = np.arange(start, end)
    distance = np.arange(first_query, end)[:, None] - positions[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return _Segment(
        queries=slice(rows.query_starts[row], rows.query_starts[row + 1]),
        slots=_int64(slots_of([rows.block_tables[row]], positions[None, :], rows.block_size)[0], device),
        mask=torch.from_numpy(seen).to(device)[None, None],
        num_rows=1,
        num_queries=num_queries,
        context_len=end - start,
    )


def slots_of(
    block_tables: Sequence[Sequence[int]], positions: npt.NDArray[np.int64], block_size: int
) -> npt.NDArray[np.int64]:
    """Slots of `positions` [rows, n], each row through its own block table."""
    tables = np.zeros((len(block_tables), max(map(len, block_tables))), dtype=np.int64)
    for row, table in enumerate(block_tables):
        tables[row, : len(table)] = table
    blocks = np.take_along_axis(tables, positions // block_size, axis=1)
    return blocks * block_size + positions % block_size


def _int64(values: list[int] | npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64).to(device)
