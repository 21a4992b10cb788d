"""One call of every op as real models make it: what `python -m kernels.compile` compiles, and a GPU bench may time.

Tensors hold no values here; on the meta device they do not even hold memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.block_copy import triton as block_copy
from kernels.kv_swap import triton as kv_swap
from kernels.kv_write import triton as kv_write
from kernels.paged_attention.rows import PagedRows
from kernels.paged_attention.triton import TritonAttention
from kernels.quant_matmul import triton as quant_matmul
from kernels.quant_matmul.weights import QuantizedWeight
from kernels.rms_norm import triton as rms_norm
from kernels.rope import triton as rope
from kernels.sampling import triton as sampling
from kernels.sampling.draws import Draws, Support, TokenEdits
from kernels.silu_mul import triton as silu_mul
from kernels.verify import triton as verify


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model the kernels see."""

    name: str
    dtype: torch.dtype
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    window: int | None = None
    softcap: float | None = None


LLAMA_8B = Shape("llama-8b", torch.bfloat16, 4096, 32, 8, 128, 14336, 128256)
GEMMA_9B = Shape("gemma-9b", torch.bfloat16, 3584, 16, 8, 256, 14336, 256000, window=4096, softcap=50.0)
SMOLLM_FP16 = Shape("smollm2-135m", torch.float16, 576, 9, 3, 64, 1536, 49152)
SMOLLM_FP32 = Shape("smollm2-135m fp32", torch.float32, 576, 9, 3, 64, 1536, 49152)
SHAPES = (LLAMA_8B, GEMMA_9B, SMOLLM_FP16, SMOLLM_FP32)

NUM_TOKENS, NUM_BLOCKS, BLOCK_SIZE = 64, 512, 16


@dataclass(frozen=True, slots=True)
class Call:
    """`run` launches every kernel of the op."""

    op: str
    shape: str
    run: Callable[[], object]


def calls(device: torch.device) -> Iterator[Call]:
    for shape in SHAPES:
        yield from _layer_calls(shape, device)
    for shape in (LLAMA_8B, SMOLLM_FP32):
        yield from _matmul_calls(shape, device)
    yield from _cache_calls(LLAMA_8B, device)
    yield from _drawing_calls(LLAMA_8B, device)


def _layer_calls(shape: Shape, device: torch.device) -> Iterator[Call]:
    """The ops of one layer, on NUM_TOKENS tokens."""

    def tensor(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=shape.dtype, device=device)

    hidden, gate_up = tensor(NUM_TOKENS, shape.hidden), tensor(NUM_TOKENS, 2 * shape.mlp)
    heads = tensor(NUM_TOKENS, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    query, key, value = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    pools = tensor(2, NUM_BLOCKS, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    wide, narrow = (torch.empty(size, device=device) for size in (shape.hidden, shape.head_dim))
    angle = torch.empty((NUM_TOKENS, 1, shape.head_dim // 2), device=device)
    slots = torch.empty(NUM_TOKENS, dtype=torch.int64, device=device)
    decode = PagedRows([0, 1], [600], [list(range(38))], BLOCK_SIZE)
    prefill = PagedRows([0, NUM_TOKENS], [600], [list(range(38))], BLOCK_SIZE)

    def attend(rows: PagedRows) -> torch.Tensor:
        attention = TritonAttention(rows, device, shape.window)
        return attention(query, pools[0], pools[1], shape.head_dim**-0.5, shape.softcap)

    yield Call("rms_norm", shape.name, lambda: rms_norm.rms_norm(hidden, wide, 1e-5))
    yield Call("rms_norm + residual", shape.name, lambda: rms_norm.add_rms_norm(hidden, hidden, wide, 1e-5))
    yield Call("rms_norm of heads", shape.name, lambda: rms_norm.rms_norm(query, narrow, 1e-5))
    yield Call("rope", shape.name, lambda: rope.apply_rope(heads[:, : shape.heads + shape.kv_heads], angle, angle))
    yield Call("kv_write", shape.name, lambda: kv_write.write_kv(key, value, pools[0], pools[1], slots))
    yield Call(
        "kv_write + rope",
        shape.name,
        lambda: kv_write.turn_and_write_kv(query, key, value, angle, angle, pools[0], pools[1], slots),
    )
    gate = silu_mul.gelu_mul if shape.softcap else silu_mul.silu_mul
    yield Call("silu_mul", shape.name, lambda: gate(gate_up))
    yield Call("attention, decode", shape.name, lambda: attend(decode))
    yield Call("attention, prefill", shape.name, lambda: attend(prefill))


def _matmul_calls(shape: Shape, device: torch.device) -> Iterator[Call]:
    """The down projection: the longest sum."""
    int8 = QuantizedWeight(
        torch.empty((shape.hidden, shape.mlp), dtype=torch.int8, device=device),
        torch.empty((shape.hidden, 1), device=device),
        8,
        shape.mlp,
    )
    int4 = QuantizedWeight(
        torch.empty((shape.hidden, shape.mlp // 2), dtype=torch.uint8, device=device),
        torch.empty((shape.hidden, shape.mlp // 128), device=device),
        4,
        128,
    )
    for name, weight in (("int8", int8), ("int4", int4)):
        for num_rows in (1, 2048):
            x = torch.empty((num_rows, shape.mlp), dtype=shape.dtype, device=device)

            def run(x: torch.Tensor = x, weight: QuantizedWeight = weight) -> torch.Tensor:
                return quant_matmul.quant_matmul(x, weight)

            yield Call(f"{name} matmul, {num_rows} rows", shape.name, run)


def _cache_calls(shape: Shape, device: torch.device) -> Iterator[Call]:
    block = (BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    pool = torch.empty((2, 2, NUM_BLOCKS, *block), dtype=shape.dtype, device=device)
    host = torch.empty((4, 2, 2, *block), dtype=shape.dtype, device=device)
    blocks = torch.empty(4, dtype=torch.int64, device=device)
    yield Call("block_copy", shape.name, lambda: block_copy.copy_blocks(pool, blocks, blocks))
    yield Call("kv_swap, out", shape.name, lambda: kv_swap.swap_out(pool, blocks, host, [0, 1, 2, 3]))
    yield Call("kv_swap, in", shape.name, lambda: kv_swap.swap_in(host, [0, 1, 2, 3], pool, blocks))


def _drawing_calls(shape: Shape, device: torch.device) -> Iterator[Call]:
    def column(dtype: torch.dtype, size: int = NUM_TOKENS) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    floats, ints, longs = torch.float32, torch.int32, torch.int64
    logits = torch.empty((NUM_TOKENS, shape.vocab), device=device)
    mask = torch.empty((NUM_TOKENS, shape.vocab // 32), dtype=ints, device=device)
    draws = Draws(
        places=column(longs),
        temperatures=column(floats),
        seeds=column(longs),
        choices=column(ints),
        output_indices=column(ints),
        repetition_penalties=column(floats),
        frequency_penalties=column(floats),
        presence_penalties=column(floats),
    )
    starts = column(longs, NUM_TOKENS + 1)
    edits = TokenEdits(starts, column(longs), column(floats), column(torch.bool), column(ints))
    support = Support(column(floats), column(longs))
    targets, is_token = column(longs, 2 * NUM_TOKENS), column(torch.bool, 2 * NUM_TOKENS)
    yield Call("sampling", shape.name, lambda: sampling.sample(logits, draws))
    yield Call("sampling, all at once", shape.name, lambda: sampling.sample(logits, draws, edits, support, mask))
    yield Call("verify", shape.name, lambda: verify.count_accepted(targets, is_token, column(longs), starts))
