"""How long each kernel takes at the sizes of a Llama-8B, and how near it comes to the roof that bounds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.gpu.budget import Budget
from bench.gpu.correctness import _draws, _on
from bench.gpu.machine import Machine
from bench.gpu.roofs import Roofs
from kernels.block_copy import triton as block_copy
from kernels.calls import LLAMA_8B, Shape
from kernels.kv_write import triton as kv_write
from kernels.paged_attention.rows import PagedRows
from kernels.paged_attention.triton import TritonAttention
from kernels.quant_matmul import triton as quant_matmul
from kernels.quant_matmul.weights import QuantizedWeight
from kernels.rms_norm import triton as rms_norm
from kernels.sampling import triton as sampling
from kernels.silu_mul import triton as silu_mul

_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Work:
    """One call, the bytes it must move and the products it must compute."""

    name: str
    run: Callable[[], object]
    num_bytes: int
    num_flops: int = 0


def time_all(machine: Machine, roofs: Roofs, budget: Budget) -> dict[str, Any]:
    found: dict[str, Any] = {}
    skipped: list[str] = []
    for work in budget.while_it_lasts(works(machine), skipped, lambda work: work.name):
        try:
            seconds = machine.seconds(work.run)
        except Exception as error:
            found[work.name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        best = max(work.num_bytes / roofs.copy_bytes_per_second, work.num_flops / roofs.matmul_flops)
        found[work.name] = {
            "microseconds": round(seconds * 1e6, 2),
            "gigabytes_per_second": round(work.num_bytes / seconds / 1e9, 1),
            "teraflops": round(work.num_flops / seconds / 1e12, 2),
            "share_of_roof": round(best / seconds, 3),
        }
    return {"kernels": found, "skipped": skipped}


def shape_of(machine: Machine) -> Shape:
    if machine.is_dry:
        return replace(LLAMA_8B, dtype=machine.dtype, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=300)
    return LLAMA_8B


def works(machine: Machine) -> Iterator[Work]:
    shape = shape_of(machine)
    few, many = (2, 20) if machine.is_dry else (64, 4096)
    for num_tokens in (few, many):
        yield from _elementwise(machine, shape, num_tokens)
    yield from _decodes(machine, shape)
    yield _prefill(machine, shape, many)
    for num_rows in (1, few, many):
        yield from _matmuls(machine, shape, num_rows)
    yield from _rest(machine, shape, few)


def _tensor(machine: Machine, shape: Shape, *size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=shape.dtype, device=machine.torch_device)


def _elementwise(machine: Machine, shape: Shape, num_tokens: int) -> Iterator[Work]:
    device, item = machine.torch_device, shape.dtype.itemsize
    x = _tensor(machine, shape, num_tokens, shape.hidden)
    weight = torch.ones(shape.hidden, device=device)
    yield Work(
        f"rms_norm + residual, {num_tokens} tokens",
        lambda: rms_norm.add_rms_norm(x, x, weight, 1e-5),
        4 * x.numel() * item,
    )
    gate_up = _tensor(machine, shape, num_tokens, 2 * shape.mlp)
    yield Work(f"silu_mul, {num_tokens} tokens", lambda: silu_mul.silu_mul(gate_up), gate_up.numel() * item * 3 // 2)
    heads = _tensor(machine, shape, num_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    query, key, value = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    angle = torch.zeros(num_tokens, 1, shape.head_dim // 2, device=device)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    pools = _tensor(machine, shape, 2, num_blocks, _BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    slots = torch.arange(num_tokens, device=device)
    yield Work(
        f"kv_write + rope, {num_tokens} tokens",
        lambda: kv_write.turn_and_write_kv(query, key, value, angle, angle, pools[0], pools[1], slots),
        2 * heads.numel() * item,
    )


def _decodes(machine: Machine, shape: Shape) -> Iterator[Work]:
    sizes = [(2, 40)] if machine.is_dry else [(1, 2048), (1, 32_768), (64, 512), (64, 4096)]
    for num_rows, context_len in sizes:
        count = -(-context_len // _BLOCK_SIZE)
        tables = [list(range(row * count, (row + 1) * count)) for row in range(num_rows)]
        rows = PagedRows(list(range(num_rows + 1)), [context_len] * num_rows, tables, _BLOCK_SIZE)
        query = _tensor(machine, shape, num_rows, shape.heads, shape.head_dim)
        pools = _tensor(machine, shape, 2, num_rows * count, _BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        attention = TritonAttention(rows, machine.torch_device, None)

        def run(
            attention: TritonAttention = attention, query: torch.Tensor = query, pools: torch.Tensor = pools
        ) -> object:
            return attention(query, pools[0], pools[1], shape.head_dim**-0.5)

        num_bytes = 2 * num_rows * context_len * shape.kv_heads * shape.head_dim * shape.dtype.itemsize
        yield Work(f"attention, {num_rows} decodes at {context_len}", run, num_bytes)


def _prefill(machine: Machine, shape: Shape, num_tokens: int) -> Work:
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    rows = PagedRows([0, num_tokens], [num_tokens], [list(range(num_blocks))], _BLOCK_SIZE)
    query = _tensor(machine, shape, num_tokens, shape.heads, shape.head_dim)
    pools = _tensor(machine, shape, 2, num_blocks, _BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    attention = TritonAttention(rows, machine.torch_device, None)
    return Work(
        f"attention, prefill of {num_tokens}",
        lambda: attention(query, pools[0], pools[1], shape.head_dim**-0.5),
        2 * query.numel() * shape.dtype.itemsize,
        2 * shape.heads * shape.head_dim * num_tokens * num_tokens,  # of the 4 n^2 products, the half that is seen
    )


def _matmuls(machine: Machine, shape: Shape, num_rows: int) -> Iterator[Work]:
    """The gate and up projections."""
    device, outputs, inputs = machine.torch_device, 2 * shape.mlp, shape.hidden
    x = _tensor(machine, shape, num_rows, inputs)
    moved = (x.numel() + num_rows * outputs) * shape.dtype.itemsize
    flops = 2 * num_rows * inputs * outputs
    dense = _tensor(machine, shape, outputs, inputs)
    yield Work(
        f"dense matmul, {num_rows} rows",
        lambda: torch.nn.functional.linear(x, dense),
        moved + dense.numel() * shape.dtype.itemsize,
        flops,
    )
    group = 32 if machine.is_dry else 128
    int8 = QuantizedWeight(
        torch.zeros(outputs, inputs, dtype=torch.int8, device=device), torch.ones(outputs, 1, device=device), 8, inputs
    )
    int4 = QuantizedWeight(
        torch.zeros(outputs, inputs // 2, dtype=torch.uint8, device=device),
        torch.ones(outputs, inputs // group, device=device),
        4,
        group,
    )
    for name, weight in (("int8", int8), ("int4", int4)):

        def run(weight: QuantizedWeight = weight) -> object:
            return quant_matmul.quant_matmul(x, weight)

        yield Work(f"{name} matmul, {num_rows} rows", run, moved + weight.values.numel(), flops)


def _rest(machine: Machine, shape: Shape, num_rows: int) -> Iterator[Work]:
    device = machine.torch_device
    logits = torch.zeros(num_rows, shape.vocab, device=device)
    greedy = _on(device, replace(_draws(num_rows), temperatures=torch.zeros(num_rows)))
    warm = _on(device, replace(_draws(num_rows), temperatures=torch.ones(num_rows)))
    num_bytes = logits.numel() * 4
    yield Work(f"sampling, greedy, {num_rows} rows", lambda: sampling.sample(logits, greedy), num_bytes)
    yield Work(f"sampling, T=1, {num_rows} rows", lambda: sampling.sample(logits, warm), num_bytes)
    num_layers, num_blocks = (2, 8) if machine.is_dry else (32, 64)
    pool = _tensor(machine, shape, num_layers, 2, 2 * num_blocks, _BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    ids = torch.arange(num_blocks, device=device)
    yield Work(
        f"block_copy, {num_blocks} blocks",
        lambda: block_copy.copy_blocks(pool, ids, ids + num_blocks),
        pool.numel() * shape.dtype.itemsize,
    )
