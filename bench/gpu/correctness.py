"""Every kernel against its formula in fp64, in every dtype: the largest error in units of the dtype's last place.

The formulas are written once more here, from the docstrings of the ops, so that a mistake in a reference would show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.budget import Budget
from bench.gpu.machine import Machine
from kernels.block_copy import triton as block_copy
from kernels.kv_swap import triton as kv_swap
from kernels.kv_write import triton as kv_write
from kernels.paged_attention.rows import PagedRows
from kernels.paged_attention.triton import TritonAttention
from kernels.quant_matmul import triton as quant_matmul
from kernels.quant_matmul.weights import dequantize, quantize_int4, quantize_int8
from kernels.rms_norm import triton as rms_norm
from kernels.rope import triton as rope
from kernels.sampling import reference as sampling_reference
from kernels.sampling import triton as sampling
from kernels.sampling.draws import Draws
from kernels.silu_mul import triton as silu_mul
from kernels.verify import reference as verify_reference
from kernels.verify import triton as verify

_BLOCK_SIZE = 16
_MOST_ULPS = {torch.float32: 64.0, torch.float16: 6.0, torch.bfloat16: 6.0}  # of the largest expected number


@dataclass(frozen=True)
class Case:
    """`run` returns what the kernel gave and what it should be."""

    name: str
    dtype: torch.dtype | None  # None: exact, bit for bit
    run: Callable[[], tuple[torch.Tensor, torch.Tensor]]


def check(machine: Machine, budget: Budget) -> dict[str, Any]:
    """By case: the error in units in the last place, and whether it is small enough."""
    found: dict[str, Any] = {}
    skipped: list[str] = []
    for case in budget.while_it_lasts(list(cases(machine)), skipped, lambda case: case.name):
        try:
            found[case.name] = judged(*case.run(), case.dtype)
        except Exception as error:  # a kernel that does not even run is a finding, and no end of the bench
            found[case.name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return {"cases": found, "skipped": skipped, "num_wrong": sum(not each["ok"] for each in found.values())}


def judged(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None) -> dict[str, Any]:
    """Errors count against the size of the largest number expected."""
    if dtype is None:
        num_wrong = int((found != expected).sum()) if found.shape == expected.shape else -1
        return {"num_different": num_wrong, "ok": num_wrong == 0}
    unit = torch.finfo(dtype).eps * max(float(expected.abs().max()), 1e-30)
    ulps = float((found.double() - expected.double()).abs().max()) / unit
    return {"ulps": round(ulps, 3), "ok": ulps <= _MOST_ULPS[dtype]}  # NaN is not small


def cases(machine: Machine) -> Iterator[Case]:
    for dtype in machine.dtypes:
        yield from _elementwise(machine, dtype)
        yield from _attention(machine, dtype)
        yield from _matmuls(machine, dtype)
    yield from _exact(machine)


def _noise(machine: Machine, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(machine.torch_device)


def _label(name: str, dtype: torch.dtype) -> str:
    return f"{name}, {str(dtype).removeprefix('torch.')}"


def _elementwise(machine: Machine, dtype: torch.dtype) -> Iterator[Case]:
    num_tokens, hidden, head_dim = (5, 96, 32) if machine.is_dry else (300, 4096, 128)
    x, residual = (_noise(machine, num_tokens, hidden, seed=seed).to(dtype) for seed in (0, 1))
    weight = _noise(machine, hidden, seed=2)

    def normed(wide: torch.Tensor) -> torch.Tensor:
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    yield Case(_label("rms_norm", dtype), dtype, lambda: (rms_norm.rms_norm(x, weight, 1e-5), normed(x.double())))
    yield Case(
        _label("rms_norm + residual", dtype),
        dtype,
        lambda: (
            rms_norm.add_rms_norm(x, residual, weight, 1e-5)[0],
            normed((x.double() + residual.double()).to(dtype).double()),
        ),
    )

    def gated() -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = x.double().chunk(2, dim=1)
        return silu_mul.silu_mul(x), gate * gate.sigmoid() * up

    yield Case(_label("silu_mul", dtype), dtype, gated)

    def tanh_gated() -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = x.double().chunk(2, dim=1)
        return silu_mul.gelu_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up

    yield Case(_label("gelu_mul", dtype), dtype, tanh_gated)
    heads = _noise(machine, num_tokens, 6, head_dim, seed=3).to(dtype)
    angle = _noise(machine, num_tokens, 1, head_dim // 2, seed=4)
    cos, sin = angle.cos(), angle.sin()

    def turned(part: torch.Tensor) -> torch.Tensor:
        first, second = part.double().chunk(2, dim=2)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=2)

    yield Case(_label("rope", dtype), dtype, lambda: (rope.apply_rope(heads, cos, sin), turned(heads)))

    def written() -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = torch.split(heads, [4, 1, 1], dim=1)
        num_blocks = -(-num_tokens // _BLOCK_SIZE) + 1
        pools = torch.zeros(2, num_blocks, _BLOCK_SIZE, 1, head_dim, dtype=dtype, device=machine.torch_device)
        slots = torch.randperm(num_blocks * _BLOCK_SIZE, generator=torch.Generator().manual_seed(5))[:num_tokens]
        slots = slots.to(machine.torch_device)
        found = kv_write.turn_and_write_kv(query, key, value, cos, sin, pools[0], pools[1], slots)
        stored = pools.view(2, -1, 1, head_dim)[:, slots]
        return torch.cat((found, stored[0], stored[1]), dim=1), torch.cat((turned(heads[:, :5]), value.double()), dim=1)

    yield Case(_label("kv_write + rope", dtype), dtype, written)


def _attention(machine: Machine, dtype: torch.dtype) -> Iterator[Case]:
    heads, kv_heads, head_dim = (4, 2, 16) if machine.is_dry else (32, 8, 128)
    shapes = {
        "decode": ([1, 1, 1], [1, 17, 300] if machine.is_dry else [1, 700, 4100]),
        "chunks": ([3, 20], [3, 45] if machine.is_dry else [40, 2000]),
        "prefill": ([40], [40]) if machine.is_dry else ([1500], [1500]),
    }
    for name, (nums, lens) in shapes.items():
        for window, softcap in ((None, None), (33, 30.0)):
            rows, num_blocks = _rows(nums, lens)
            query = _noise(machine, sum(nums), heads, head_dim, seed=6).to(dtype)
            pools = _noise(machine, 2, num_blocks, _BLOCK_SIZE, kv_heads, head_dim, seed=7).to(dtype)

            def run(
                rows: PagedRows = rows,
                query: torch.Tensor = query,
                pools: torch.Tensor = pools,
                window: int | None = window,
                softcap: float | None = softcap,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                attend = TritonAttention(rows, machine.torch_device, window)
                found = attend(query, pools[0], pools[1], head_dim**-0.5, softcap)
                return found, _attended(query, pools, rows, head_dim**-0.5, window, softcap)

            kind = " with window and softcap" if window else ""
            yield Case(_label(f"attention, {name}{kind}", dtype), dtype, run)


def _rows(nums: list[int], lens: list[int]) -> tuple[PagedRows, int]:
    """Rows with blocks in no order."""
    starts = [0]
    for num in nums:
        starts.append(starts[-1] + num)
    counts = [-(-length // _BLOCK_SIZE) for length in lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(8)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    return PagedRows(starts, lens, tables, _BLOCK_SIZE), sum(counts)


def _attended(
    query: torch.Tensor, pools: torch.Tensor, rows: PagedRows, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    group = query.shape[1] // pools.shape[3]
    parts = []
    for row, table in enumerate(rows.block_tables):
        mine = query[rows.query_starts[row] : rows.query_starts[row + 1]].double()
        length = rows.context_lens[row]
        keys, values = (pool[table].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for pool in pools)
        score = torch.einsum("qhd,khd->hqk", mine, keys) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        place = torch.arange(length, device=query.device)
        behind = place[length - len(mine) :, None] - place[None, :]
        hidden = (behind < 0) | (behind >= (window or length))
        weights = score.masked_fill(hidden, -math.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(parts)


def _matmuls(machine: Machine, dtype: torch.dtype) -> Iterator[Case]:
    num_inputs, num_outputs = (256, 40) if machine.is_dry else (4096, 1000)
    weight = _noise(machine, num_outputs, num_inputs, seed=9)
    for bits, quantized in (("int8", quantize_int8(weight)), ("int4", quantize_int4(weight, 128))):
        for num_rows in (1, 20) if machine.is_dry else (1, 17, 300):
            x = _noise(machine, num_rows, num_inputs, seed=10).to(dtype)

            def run(x: torch.Tensor = x, quantized: Any = quantized) -> tuple[torch.Tensor, torch.Tensor]:
                return quant_matmul.quant_matmul(x, quantized), x.double() @ dequantize(quantized).double().T

            yield Case(_label(f"{bits} matmul, {num_rows} rows", dtype), dtype, run)


def _exact(machine: Machine) -> Iterator[Case]:
    """What moves or chooses and computes nothing: bit for bit."""
    device = machine.torch_device
    pool = _noise(machine, 2, 2, 12, _BLOCK_SIZE, 2, 32, seed=11)
    sources, targets = (torch.tensor(ids, device=device) for ids in ([1, 5, 9], [0, 2, 11]))

    def copied() -> tuple[torch.Tensor, torch.Tensor]:
        mine, expected = pool.clone(), pool.clone()
        block_copy.copy_blocks(mine, sources, targets)
        expected[:, :, targets] = pool[:, :, sources]
        return mine, expected

    yield Case("block_copy", None, copied)

    def swapped() -> tuple[torch.Tensor, torch.Tensor]:
        host = torch.zeros(4, 2, 2, _BLOCK_SIZE, 2, 32)
        host = host if machine.is_dry else host.pin_memory()
        mine, expected = pool.clone(), pool.clone()
        kv_swap.swap_out(mine, sources, host, [3, 0, 2])
        machine.synchronize()
        kv_swap.swap_in(host, [3, 0, 2], mine, targets)
        expected[:, :, targets] = pool[:, :, sources]
        return mine, expected

    yield Case("kv_swap, out and back", None, swapped)
    vocab = 5000 if machine.is_dry else 128_256
    logits = _noise(machine, 6, vocab, seed=12) * 3

    def drawn() -> tuple[torch.Tensor, torch.Tensor]:
        draws = _draws(6)
        expected = sampling_reference.sample(logits.cpu(), draws).token_ids
        return sampling.sample(logits, _on(device, draws)).token_ids.cpu(), expected

    yield Case("sampling", None, drawn)

    def accepted() -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(13)
        starts = torch.tensor([0, 0, 5, 12, 60])
        targets = torch.randint(2, (64,), generator=generator)
        is_token = torch.ones(64, dtype=torch.bool)
        proposals = targets[torch.randperm(60, generator=generator)]
        expected = verify_reference.count_accepted(targets, is_token, proposals, starts)
        arguments = (each.to(device) for each in (targets, is_token, proposals, starts))
        return verify.count_accepted(*arguments).cpu(), expected

    yield Case("verify", None, accepted)


def _draws(count: int) -> Draws:
    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    ones, zeros = [1.0] * count, [0.0] * count
    return Draws(
        places=torch.arange(count),
        temperatures=column([index * 0.4 for index in range(count)], torch.float32),
        seeds=column([index * 7919 for index in range(count)], torch.int64),
        choices=column([index % 3 for index in range(count)], torch.int32),
        output_indices=column([index * 100 for index in range(count)], torch.int32),
        repetition_penalties=column(ones, torch.float32),
        frequency_penalties=column(zeros, torch.float32),
        presence_penalties=column(zeros, torch.float32),
    )


def _on(device: torch.device, draws: Draws) -> Draws:
    return Draws(**{name: getattr(draws, name).to(device) for name in Draws.__dataclass_fields__})
