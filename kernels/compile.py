"""`python -m kernels.compile [--output FILE]`: compiles every Triton kernel for every target without a GPU; fails where
one spills. Prints what each asks of a multiprocessor, and an estimate of its occupancy; writes the same as JSON.

The calls of `kernels.calls` run on tensors without memory; instead of launching a kernel, its arguments are noted.
So what is compiled is what is launched: the same constants, warps and alignments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from kernels.binaries import Resources, read_cubin, read_hsaco
from kernels.targets import TARGETS, Target

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of one kernel: everything that the compiler is told."""

    kernel: Any  # triton.JITFunction
    types: dict[str, str]  # argument -> type, "constexpr" for what is fixed
    constants: dict[str, object]
    alignments: dict[tuple[int, ...], list[list[object]]]
    options: dict[str, object]

    @property
    def key(self) -> tuple[object, ...]:
        fixed = (self.types, self.constants, self.alignments, self.options)
        return (self.kernel.__name__, *(tuple(sorted(map(repr, table.items()))) for table in fixed))


@dataclass(frozen=True, slots=True)
class Compiled:
    resources: Resources
    num_warps: int


def launch_of(kernel: Any, arguments: tuple[object, ...], named: dict[str, object]) -> Launch:
    """What `kernel[grid](*arguments, **named)` would have compiled, its tensors aligned as torch aligns them."""
    parameters = {parameter.name: parameter for parameter in kernel.params}
    options = {name: value for name, value in named.items() if name not in parameters}
    bound = signature(kernel.fn).bind(*arguments, **{name: named[name] for name in named if name in parameters})
    types: dict[str, str] = {}
    constants: dict[str, object] = {}
    alignments: dict[tuple[int, ...], list[list[object]]] = {}
    for place, (name, value) in enumerate(bound.arguments.items()):
        if isinstance(value, torch.Tensor):
            types[name] = _TYPES[value.dtype]
            if value.storage_offset() * value.itemsize % 16 == 0:
                alignments[(place,)] = _ALIGNED
        elif isinstance(value, float) and not parameters[name].is_constexpr:
            types[name] = "fp32"
        elif isinstance(value, int) and not parameters[name].is_constexpr and value != 1:  # 1 is compiled in
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                alignments[(place,)] = _ALIGNED
        else:
            types[name] = "constexpr"
            constants[name] = value
    return Launch(kernel, types, constants, alignments, options)


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Inside, kernels are noted in the list that this gives, and not launched."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def note(kernel: Any, *arguments: object, grid: object, warmup: bool, **named: object) -> None:
        launches.append(launch_of(kernel, arguments, named))

    run = JITFunction.run
    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run


def compile_for(target: Target, launch: Launch) -> Compiled:
    """Raises what the compiler raises, and UnreadableBinary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(launch.kernel, launch.types, launch.constants, launch.alignments)
    gpu = GPUTarget(target.backend, target.architecture, target.threads_per_warp)
    compiled = triton.compile(source, target=gpu, options=launch.options)
    if target.backend == "hip":
        return Compiled(read_hsaco(compiled.asm["hsaco"], compiled.metadata.shared), compiled.metadata.num_warps)
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return Compiled(read_cubin(compiled.asm["cubin"], compiled.metadata.shared, cuobjdump), compiled.metadata.num_warps)


def main() -> int:
    """Prints the table; 1 where a kernel spills or the package triton is missing."""
    if find_spec("triton") is None:
        print("kernels-compile: the package triton is not installed; pip install triton", file=sys.stderr)
        return 1
    from kernels.calls import calls

    parser = argparse.ArgumentParser(prog="python -m kernels.compile")
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    columns = "".join(f"{f'{target.name}: regs spill shared warps':>32}" for target in TARGETS)
    print(f"{'kernel':<20} {'op':<24} {'model':<18}{columns}")
    seen: set[tuple[object, ...]] = set()
    table: list[dict[str, object]] = []
    num_spilling = 0
    with ThreadPoolExecutor() as pool:
        for call in calls(torch.device("meta")):
            with noted_launches() as launches:
                call.run()
            for launch in launches:
                if launch.key in seen:
                    continue
                seen.add(launch.key)
                found = list(pool.map(lambda target, launch=launch: compile_for(target, launch), TARGETS))
                cells = "".join(_cell(target, compiled) for target, compiled in zip(TARGETS, found, strict=True))
                print(f"{launch.kernel.__name__:<20} {call.op:<24} {call.shape:<18}{cells}", flush=True)
                names = {"kernel": launch.kernel.__name__, "op": call.op, "model": call.shape}
                table.append({**names, **{t.name: _numbers(t, c) for t, c in zip(TARGETS, found, strict=True)}})
                num_spilling += any(compiled.resources.spilled_bytes for compiled in found)
    if output is not None:
        output.write_text(json.dumps({"triton": version("triton"), "kernels": table}, indent=1) + "\n")
    print(f"kernels-compile: {len(table)} kernels for {len(TARGETS)} targets, {num_spilling} spill")
    return 1 if num_spilling else 0


def _numbers(target: Target, compiled: Compiled) -> dict[str, int]:
    resources = compiled.resources
    return {
        "registers": resources.registers,
        "spilled_bytes": resources.spilled_bytes,
        "shared_bytes": resources.shared_bytes,
        "num_warps": compiled.num_warps,
        "warps_held": target.warps_held(resources, compiled.num_warps),
        "max_warps": target.max_warps,
    }


def _cell(target: Target, compiled: Compiled) -> str:
    numbers = _numbers(target, compiled)
    text = "{registers} {spilled_bytes} {shared_bytes} {warps_held}/{max_warps}".format(**numbers)
    return f"{text:>32}"


if __name__ == "__main__":
    sys.exit(main())
