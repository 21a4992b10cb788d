"""For each query q at position p, over the keys k and values v at positions max(0, p - window + 1) .. p:

    score = scale * (q . k);   with softcap c: score = c * tanh(score / c);   y = sum softmax(score) * v

Keys are taken in tiles of a fixed length at absolute positions. Rows of few queries (decodes, verifications) are split
over programs by a fixed number of keys, too, so nothing in a row's arithmetic depends on the batch around it.
Rows of many queries (prefill chunks) walk over all their keys in one program with larger tiles of queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.paged_attention.rows import PagedRows, RowTensors
from kernels.paged_attention.tiles import Tiles, cut_tiles

SPLIT_LEN = 256  # keys of one program of a short row; a multiple of every tile's length
MAX_SHORT_QUERIES = 16  # a row of up to so many queries is short
_SHORT_PAIRS = 16  # the fewest rows that a matrix instruction takes
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Tile sizes, by what registers and shared memory hold; the arithmetic of a row depends on tile_keys alone."""

    tile_keys: int
    long_pairs: int
    num_warps: int  # of a program of a long row
    short_stages: int  # tiles of keys that are under way at once in a program of a short row
    long_stages: int


def _shape(head_dim: int, dtype: torch.dtype) -> _Shape:
    if dtype == torch.float32:
        return _Shape(tile_keys=16, long_pairs=16, num_warps=4, short_stages=2, long_stages=3)
    if head_dim > 128:
        return _Shape(tile_keys=32, long_pairs=64, num_warps=8, short_stages=2, long_stages=2)
    return _Shape(tile_keys=32, long_pairs=64, num_warps=4, short_stages=3, long_stages=2)


class TritonAttention:
    """Attention for the rows of one step, under one window.

    `tensors`: where the kernels read the rows, for a graph; `rows` are then their bounds.
    `is_invariant`: long rows go the way of short ones, too: then a query's result is the same in a chunk, a decode
    and a verification. Several times slower on long prompts.
    """

    def __init__(
        self,
        rows: PagedRows,
        device: torch.device,
        window: int | None,
        tensors: RowTensors | None = None,
        is_invariant: bool = False,
    ) -> None:
        limit = max(map(rows.num_queries, range(len(rows))), default=0) if is_invariant else MAX_SHORT_QUERIES
        self._rows, self._device, self._window = rows, device, window
        self._short = [row for row in range(len(rows)) if rows.num_queries(row) <= limit]
        self._long = [row for row in range(len(rows)) if rows.num_queries(row) > limit]
        self._tensors = tensors or RowTensors(
            query_starts=self._int32(np.array(rows.query_starts, dtype=np.int32)),
            context_lens=self._int32(np.array(rows.context_lens, dtype=np.int32)),
            block_tables=self._int32(_padded(rows.block_tables)),
        )
        self._cut: dict[tuple[int, int, bool], tuple[Tiles, torch.Tensor]] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key_pool: torch.Tensor,
        value_pool: torch.Tensor,
        scale: float,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """query: [tokens, heads, head_dim], heads contiguous; pools: [blocks, block_size, kv_heads, head_dim], of one
        dtype with the query. Returns query's shape.
        """
        if query.stride(2) != 1 or not (key_pool.is_contiguous() and value_pool.is_contiguous()):
            raise ValueError("query's last dimension and the pools must be contiguous")
        if not query.dtype == key_pool.dtype == value_pool.dtype:
            raise ValueError(f"query is {query.dtype}, the pools are {key_pool.dtype} and {value_pool.dtype}")
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        shape = _shape(query.shape[2], query.dtype)
        group_size = query.shape[1] // key_pool.shape[2]
        # What every kernel below takes, in its order
        arguments = (
            query,
            key_pool,
            value_pool,
            self._tensors.query_starts,
            self._tensors.context_lens,
            self._tensors.block_tables,
            self._tensors.block_tables.stride(0),
            query.stride(0),
            query.stride(1),
            scale * _LOG2_E if softcap is None else scale / softcap,
            1.0 if softcap is None else softcap * _LOG2_E,
        )
        constants = {
            "HEADS": query.shape[1],
            "KV_HEADS": key_pool.shape[2],
            "HEAD_DIM": query.shape[2],
            "DIM_BLOCK": max(triton.next_power_of_2(query.shape[2]), 16),
            "BLOCK_SIZE": self._rows.block_size,
            "WINDOW": self._window or 0,
            "HAS_SOFTCAP": softcap is not None,
            "KEYS": shape.tile_keys,
        }
        tiles, places = self._tiles(group_size, _SHORT_PAIRS, is_short=True)
        if len(tiles):
            self._attend_short(tiles, places, output, arguments, constants, shape.short_stages)
        tiles, places = self._tiles(group_size, shape.long_pairs, is_short=False)
        if len(tiles):
            _attend_long[(len(tiles), key_pool.shape[2])](
                output,
                places,
                *arguments,
                **constants,
                PAIRS=shape.long_pairs,
                num_warps=shape.num_warps,
                num_stages=shape.long_stages,
            )
        return output

    def _attend_short(
        self,
        tiles: Tiles,
        places: torch.Tensor,
        output: torch.Tensor,
        arguments: tuple[torch.Tensor | int | float, ...],
        constants: dict[str, int | bool],
        num_stages: int,
    ) -> None:
        num_splits = triton.cdiv(tiles.max_context_len, SPLIT_LEN)
        kv_heads = constants["KV_HEADS"]
        shape = (tiles.num_pairs, kv_heads, num_splits)
        partial = torch.empty((*shape, constants["HEAD_DIM"]), dtype=torch.float32, device=output.device)
        best, total = (torch.empty(shape, dtype=torch.float32, device=output.device) for _ in range(2))
        _attend_split[(len(tiles), kv_heads, num_splits)](
            partial,
            best,
            total,
            places,
            *arguments,
            num_splits,
            **constants,
            PAIRS=_SHORT_PAIRS,
            SPLIT=SPLIT_LEN,
            num_warps=4,
            num_stages=num_stages,
        )
        names = ("HEADS", "KV_HEADS", "HEAD_DIM", "DIM_BLOCK", "WINDOW")
        _join_splits[(len(tiles), kv_heads)](
            output,
            partial,
            best,
            total,
            places,
            self._tensors.query_starts,
            self._tensors.context_lens,
            num_splits,
            **{name: constants[name] for name in names},
            PAIRS=_SHORT_PAIRS,
            SPLIT=SPLIT_LEN,
            num_warps=4,
        )

    def _tiles(self, group_size: int, tile_pairs: int, is_short: bool) -> tuple[Tiles, torch.Tensor]:
        """Cut at the first call: only the model's tensors tell the group's size."""
        key = (group_size, tile_pairs, is_short)
        if key not in self._cut:
            tiles = cut_tiles(self._rows, self._short if is_short else self._long, group_size, tile_pairs)
            self._cut[key] = (tiles, self._int32(tiles.places))
        return self._cut[key]

    def _int32(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _padded(block_tables: list[list[int]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """[rows, longest table]; what pads is never read."""
    padded = np.zeros((len(block_tables), max(map(len, block_tables), default=0)), dtype=np.int32)
    for row, table in enumerate(block_tables):
        padded[row, : len(table)] = table
    return padded


@triton.jit
def _place(places_ptr, query_starts_ptr, context_lens_ptr, tile, GROUP: tl.constexpr, PAIRS: tl.constexpr):
    """(row, pair [PAIRS] in the row, inside [PAIRS], position [PAIRS], storage [PAIRS]) of a tile.

    Pairs beyond the row's last stand at its last position, so that they widen no range.
    """
    row = tl.load(places_ptr + tile * 3)
    first = tl.load(places_ptr + tile * 3 + 1)
    before = tl.load(places_ptr + tile * 3 + 2)
    num_queries = tl.load(query_starts_ptr + row + 1) - tl.load(query_starts_ptr + row)
    pair = first + tl.arange(0, PAIRS)
    inside = pair < num_queries * GROUP
    query = tl.minimum(pair // GROUP, num_queries - 1)
    position = tl.load(context_lens_ptr + row) - num_queries + query
    return row, pair, inside, position, before + tl.arange(0, PAIRS)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    """The first position that a query sees. WINDOW 0: a model without a sliding window sees all."""
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    return position * 0


@triton.jit
def _attend(
    query,  # [PAIRS, DIM_BLOCK]
    position,  # [PAIRS]
    first_key,  # the first that any of the pairs sees, or the split's first
    end_key,
    table_ptr,
    key_ptr,  # of this key head in slot 0
    value_ptr,
    inner_scale,
    outer_scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Online softmax over keys first_key .. end_key: (largest score, sum of weights, weighted sum of values).

    Scores are in units of log 2, since exp2 is what the hardware has. A tile that a query does not see changes nothing
    for it: its weights are exactly 0 and the factor of what came before is exactly 1.
    """
    dim = tl.arange(0, DIM_BLOCK)
    best = tl.full([PAIRS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([PAIRS], dtype=tl.float32)
    output = tl.zeros([PAIRS, DIM_BLOCK], dtype=tl.float32)
    seen_from = _first_seen(position, WINDOW)
    for start in range(first_key // KEYS * KEYS, end_key, KEYS):
        key_position = start + tl.arange(0, KEYS)
        is_present = (key_position >= first_key) & (key_position < end_key)  # blocks behind a window may be another's
        block = tl.load(table_ptr + key_position // BLOCK_SIZE, mask=is_present, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + key_position % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)
        mask = is_present[:, None] & (dim < HEAD_DIM)[None, :]
        key = tl.load(key_ptr + slot[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * inner_scale
        if HAS_SOFTCAP:  # Gemma 2: tanh(x) = 1 - 2 / (1 + exp(2 x)), exact enough for a score and never inf / inf
            score = (1 - 2 / (1 + tl.exp(2 * score))) * outer_scale
        is_seen = (key_position[None, :] <= position[:, None]) & (key_position[None, :] >= seen_from[:, None])
        score = tl.where(is_seen, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)  # nothing seen yet: not -inf - -inf
        weight = tl.exp2(score - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        value = tl.load(value_ptr + slot[:, None] + dim[None, :], mask=mask, other=0.0)
        total = total * shrink + tl.sum(weight, axis=1)
        output = output * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        best = new_best
    return best, total, output


@triton.jit
def _load_query(query_ptr, token, head, inside, token_stride, head_stride, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """[PAIRS, D]"""
    dim = tl.arange(0, D)
    start = token.to(tl.int64) * token_stride + head * head_stride
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(query_ptr + start[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def _attend_split(
    partial_ptr,
    best_ptr,
    total_ptr,
    places_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    table_stride,
    query_token_stride,
    query_head_stride,
    inner_scale,
    outer_scale,
    num_splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """best, total, partial = online softmax of a tile's pairs over keys split * SPLIT .. (split + 1) * SPLIT.

    One program: one tile, one key head, one split. A split that no pair of the tile sees stores nothing, and
    `_join_splits` reads nothing of it.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row, pair, inside, position, storage = _place(
        places_ptr, query_starts_ptr, context_lens_ptr, tl.program_id(0), GROUP, PAIRS
    )
    end = tl.minimum(tl.max(position) + 1, (split + 1) * SPLIT)
    first = tl.maximum(tl.min(_first_seen(position, WINDOW)), split * SPLIT)
    if first < end:
        token = tl.load(query_starts_ptr + row) + pair // GROUP
        head = kv_head * GROUP + pair % GROUP
        query = _load_query(query_ptr, token, head, inside, query_token_stride, query_head_stride, HEAD_DIM, DIM_BLOCK)
        best, total, output = _attend(
            query,
            position,
            first,
            end,
            tables_ptr + row.to(tl.int64) * table_stride,
            key_ptr + kv_head * HEAD_DIM,
            value_ptr + kv_head * HEAD_DIM,
            inner_scale,
            outer_scale,
            KV_HEADS,
            HEAD_DIM,
            DIM_BLOCK,
            BLOCK_SIZE,
            WINDOW,
            HAS_SOFTCAP,
            PAIRS,
            KEYS,
        )
        dim = tl.arange(0, DIM_BLOCK)
        place = (storage.to(tl.int64) * KV_HEADS + kv_head) * num_splits + split
        tl.store(best_ptr + place, best, mask=inside)
        tl.store(total_ptr + place, total, mask=inside)
        mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + dim[None, :], output, mask=mask)


@triton.jit
def _join_splits(
    output_ptr,
    partial_ptr,
    best_ptr,
    total_ptr,
    places_ptr,
    query_starts_ptr,
    context_lens_ptr,
    num_splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """y = sum_s w_s * partial_s / sum_s w_s * total_s, where w_s = exp2(best_s - max best), in the order of splits.

    One program: one tile, one key head.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    row, pair, inside, position, storage = _place(
        places_ptr, query_starts_ptr, context_lens_ptr, tl.program_id(0), GROUP, PAIRS
    )
    dim = tl.arange(0, DIM_BLOCK)
    base = (storage.to(tl.int64) * KV_HEADS + kv_head) * num_splits
    first = tl.min(_first_seen(position, WINDOW)) // SPLIT
    end = tl.max(position) // SPLIT + 1
    joined_best = tl.full([PAIRS], float("-inf"), dtype=tl.float32)
    joined_total = tl.zeros([PAIRS], dtype=tl.float32)
    joined = tl.zeros([PAIRS, DIM_BLOCK], dtype=tl.float32)
    for split in range(first, end):
        best = tl.load(best_ptr + base + split, mask=inside, other=0.0)
        total = tl.load(total_ptr + base + split, mask=inside, other=1.0)
        mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + (base + split)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(joined_best, best)
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink, weight = tl.exp2(joined_best - anchor), tl.exp2(best - anchor)
        joined_total = joined_total * shrink + total * weight
        joined = joined * shrink[:, None] + partial * weight[:, None]
        joined_best = new_best
    _store_output(
        output_ptr, joined / joined_total[:, None], row, pair, inside, kv_head, query_starts_ptr, HEADS, HEAD_DIM, GROUP
    )


@triton.jit
def _store_output(
    output_ptr,
    output,
    row,
    pair,
    inside,
    kv_head,
    query_starts_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
):
    dim = tl.arange(0, output.shape[1])
    token = (tl.load(query_starts_ptr + row) + pair // GROUP).to(tl.int64)
    start = (token * HEADS + kv_head * GROUP + pair % GROUP) * HEAD_DIM
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(output_ptr + start[:, None] + dim[None, :], output.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _attend_long(
    output_ptr,
    places_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    table_stride,
    query_token_stride,
    query_head_stride,
    inner_scale,
    outer_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """y = sum softmax(score) * v over all keys that a tile's pairs see. One program: one tile, one key head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    row, pair, inside, position, _ = _place(
        places_ptr, query_starts_ptr, context_lens_ptr, tl.program_id(0), GROUP, PAIRS
    )
    token = tl.load(query_starts_ptr + row) + pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    query = _load_query(query_ptr, token, head, inside, query_token_stride, query_head_stride, HEAD_DIM, DIM_BLOCK)
    _, total, output = _attend(
        query,
        position,
        tl.min(_first_seen(position, WINDOW)),
        tl.max(position) + 1,
        tables_ptr + row.to(tl.int64) * table_stride,
        key_ptr + kv_head * HEAD_DIM,
        value_ptr + kv_head * HEAD_DIM,
        inner_scale,
        outer_scale,
        KV_HEADS,
        HEAD_DIM,
        DIM_BLOCK,
        BLOCK_SIZE,
        WINDOW,
        HAS_SOFTCAP,
        PAIRS,
        KEYS,
    )
    _store_output(
        output_ptr, output / total[:, None], row, pair, inside, kv_head, query_starts_ptr, HEADS, HEAD_DIM, GROUP
    )
