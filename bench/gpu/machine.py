"""What the bench runs on: a GPU with its clock, or, for a dry run, this CPU and Triton's interpreter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.cuda.device import CudaDevice, Device
from engine.cuda.late_device import LateDevice

_FLUSHED_BYTES = 256 << 20  # more than any L2 cache: what a call reads comes from memory


@dataclass(frozen=True)
class Machine:
    device: Device
    is_dry: bool  # tiny sizes, one call each: figures mean nothing
    dtypes: tuple[torch.dtype, ...]

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    @property
    def dtype(self) -> torch.dtype:
        """What models are computed in."""
        return self.dtypes[0]

    def seconds(self, call: Callable[[], object], seconds: float = 0.3) -> float:
        """Of one call, the median of several; none of them finds its inputs in a cache."""
        call()
        if self.is_dry:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=self.torch_device)
        found: list[float] = []
        ends = time.monotonic() + seconds
        while len(found) < 5 or (time.monotonic() < ends and len(found) < 200):
            flushed.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / 1000)
        return statistics.median(found)

    def synchronize(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize(self.torch_device)

    def describe(self) -> dict[str, Any]:
        import platform

        import triton

        found: dict[str, Any] = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "dry_run": self.is_dry,
        }
        if not self.is_dry:
            properties = torch.cuda.get_device_properties(self.torch_device)
            found |= {
                "gpu": properties.name,
                "gpu_memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
                "cuda": torch.version.cuda,
            }
        return found


def gpu() -> Machine:
    return Machine(CudaDevice(torch.device("cuda", 0)), False, (torch.bfloat16, torch.float16, torch.float32))


def interpreter() -> Machine:
    """bf16 rounds wrongly in the interpreter, so it is left out."""
    return Machine(LateDevice(), True, (torch.float32, torch.float16))
