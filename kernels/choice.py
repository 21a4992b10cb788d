"""What a dispatch answers: the implementation to call, its name, and the reason for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Generic, TypeVar

Implementation = TypeVar("Implementation")


@dataclass(frozen=True, slots=True)
class Choice(Generic[Implementation]):
    name: str  # "reference", "torch" or "triton"
    reason: str
    run: Implementation


def triton_on_gpu(
    device_type: str, load: Callable[[], Implementation], otherwise: Implementation, name: str = "reference"
) -> Choice[Implementation]:
    """Triton on a GPU, `otherwise` (called `name`) elsewhere. `load` imports the kernels: a process without a GPU never
    pays for that, nor needs the package. Where TRITON_INTERPRET asks for Triton's interpreter, as Triton's own
    documentation has it, the same kernels run on the CPU: slowly, to find out whether they are right.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        return Choice("triton", "triton: interpreted, as TRITON_INTERPRET asks", load())
    if device_type != "cuda":
        return Choice(name, f"{name}: Triton's kernels are for GPUs, not for {device_type}", otherwise)
    if find_spec("triton") is None:
        return Choice(name, f"{name}: the device is {device_type}, but the package triton is not installed", otherwise)
    return Choice("triton", f"triton: the device is {device_type}", load())
