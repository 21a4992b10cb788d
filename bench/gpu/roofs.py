"""What the machine can do at best, measured: the ceilings that every kernel is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu.machine import Machine


@dataclass(frozen=True)
class Roofs:
    copy_bytes_per_second: float  # read and written bytes, both counted
    matmul_flops: float  # per second, in the model's dtype
    to_host_bytes_per_second: float  # into pinned memory
    from_host_bytes_per_second: float


def measure(machine: Machine) -> Roofs:
    device, dtype = machine.torch_device, machine.dtype
    num_bytes, size = (1 << 16, 64) if machine.is_dry else (1 << 30, 8192)
    source, target = (torch.ones(num_bytes, dtype=torch.int8, device=device) for _ in range(2))
    a, b = (torch.randn(size, size, dtype=torch.float32).to(device, dtype) for _ in range(2))
    host = machine.device.pinned(num_bytes).view(torch.int8)
    return Roofs(
        copy_bytes_per_second=2 * num_bytes / machine.seconds(lambda: target.copy_(source)),
        matmul_flops=2 * size**3 / machine.seconds(lambda: a @ b),
        to_host_bytes_per_second=num_bytes / machine.seconds(lambda: host.copy_(source, non_blocking=True)),
        from_host_bytes_per_second=num_bytes / machine.seconds(lambda: target.copy_(host, non_blocking=True)),
    )
