"""The Triton kernels in Triton's interpreter: the same source, run by numpy on the CPU, one program after another.

Triton decides at import whether a kernel is compiled or interpreted, its own library's included. So everything is
imported here at once, and child processes of other tests inherit nothing.
bf16 rounds wrongly in the interpreter; tests take values that bf16 can hold, as fp32 (`values`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import skip_or_fail

OPS = [
    *("block_copy", "kv_swap", "kv_write", "paged_attention", "quant_matmul"),
    *("rms_norm", "rope", "sampling", "silu_mul", "verify"),
]

FLOAT32, FLOAT16, BFLOAT16_VALUES = "float32", "float16", "bfloat16 values"
DTYPES = [FLOAT32, FLOAT16, BFLOAT16_VALUES]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3}  # about 8 and 1 units in the last place


def _import_interpreted() -> dict[str, ModuleType]:
    if find_spec("triton") is None:
        try:
            skip_or_fail("the package triton is not installed")
        except pytest.skip.Exception as skipped:
            raise pytest.skip.Exception(skipped.msg, allow_module_level=True) from None
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before the interpreter could be chosen")
    with _interpreter():
        import_module("triton.experimental.gluon")  # the interpreter imports it at its first run, too late
        return {op: import_module(f"kernels.{op}.triton") for op in OPS}


@contextmanager
def _interpreter() -> Iterator[None]:
    """Kernels that are defined meanwhile are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


def interpreted(kernel: Callable[..., None]) -> Any:
    """Like triton.jit, for a kernel of a test."""
    with _interpreter():
        return import_module("triton").jit(kernel)


KERNELS = _import_interpreted()


def values(*shape: int, kind: str = FLOAT32, seed: int = 0) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == BFLOAT16_VALUES:
        return drawn.bfloat16().float()
    return drawn.to(getattr(torch, kind))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a wrapper asks for comes full of NaN, or of a large number where there is no NaN: what a kernel
    leaves unwritten, or reads before it is written, shows.
    """
    empty = torch.empty

    def poisoned_empty(*args: object, **kwargs: object) -> torch.Tensor:
        memory: torch.Tensor = empty(*args, **kwargs)  # type: ignore[call-overload]
        return memory.fill_(torch.nan if memory.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", poisoned_empty)


@pytest.fixture
def exact_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of products in an order that does not depend on a row's place in its tile, as a matrix instruction has it.
    The interpreter asks BLAS, which computes some rows of a matrix otherwise than others.
    """
    interpreter = import_module("triton.runtime.interpreter")

    def dot(self: object, a: Any, b: Any, accumulator: Any, *precision: object) -> Any:
        product = np.einsum("mk,kn->mn", a.data.astype(np.float64), b.data.astype(np.float64))
        total = product.astype(accumulator.data.dtype) + accumulator.data
        return interpreter.TensorHandle(total, accumulator.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
