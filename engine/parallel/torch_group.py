"""Ranks over torch.distributed. Sums are added in the order of ranks, so that all have the same bits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, but not in torch's list of exports
TIMEOUT_SECONDS = 300  # of one exchange, loading included; a rank that is slower counts as lost
LOOPBACK = "127.0.0.1"  # the ranks of one engine are processes of one machine


class TorchGroup:
    """Over torch.distributed: nccl between GPUs, gloo between CPUs. A process has one at most."""

    def __init__(self, rank: int, size: int, store: Store, device: torch.device) -> None:
        """Waits until all ranks are there. `store`: where they find each other."""
        timeout = timedelta(seconds=TIMEOUT_SECONDS)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self.rank, self.size, self._device = rank, size, device

    def ordered_sum(self, partial: torch.Tensor) -> torch.Tensor:
        parts = self._all(partial)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        return total.to(partial.dtype)

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._all(part), dim=-1)

    def least(self, number: int) -> int:
        return min(int(each) for each in self._all(torch.tensor([number], device=self._device)))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _all(self, part: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous())
        return parts


def listen(size: int) -> tuple[Store, int]:
    """Where the ranks meet: a store, and the port of its own that `connect` takes."""
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store: Any = _TCPStore(LOOPBACK, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    return store, store.port


def connect(port: int, size: int) -> Store:
    store: Store = _TCPStore(LOOPBACK, port, size, is_master=False, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    return store
