"""Loads a model over several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.cuda.runner import CudaRunner
from engine.errors import InvalidConfig
from engine.models.families import decoder_config, is_native
from engine.parallel.rank import RankSetup
from engine.parallel.ranks import Ranks
from engine.parallel.runner import ParallelRunner
from engine.parallel.shard import Shard
from engine.parallel.torch_group import TorchGroup, connect, listen
from engine.runner import Computation, TorchRunner, load_computation


def load_parallel(folder: Path, config: EngineConfig, device: torch.device) -> tuple[ParallelRunner, Computation]:
    """Rank 0's part, the other ranks started beside it.

    Raises InvalidConfig for a model that cannot be shared out, DeviceFailed where a rank does not come up.
    """
    size = config.tensor_parallel_size
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise InvalidConfig(
            "tensor_parallel_size", f"is {size} and there are {torch.cuda.device_count()} GPUs; lower it"
        )
    check_shares(folder, size)
    store, port = listen(size)
    ranks = Ranks(folder, config, port)
    try:
        group = TorchGroup(0, size, store, device)
        own = load_computation(folder, config, _of_rank(device, 0), group)
    except InvalidConfig:
        ranks.close()
        raise
    except Exception as error:
        loss = ranks.loss(error)
        ranks.close()
        raise loss from error
    return ParallelRunner(own.runner, ranks, group), own


def check_shares(folder: Path, size: int) -> None:
    """Before any rank is started. Raises InvalidConfig."""
    fields = json.loads((folder / "config.json").read_text())
    if not is_native(fields):
        raise InvalidConfig(
            "tensor_parallel_size",
            f"is {size}: {fields.get('model_type')} runs through transformers, on one device only",
        )
    Shard(0, size).config(decoder_config(fields))


def load_rank(setup: RankSetup) -> tuple[TorchGroup, TorchRunner | CudaRunner]:
    """What a rank other than 0 has."""
    size = setup.config.tensor_parallel_size
    kind = "cuda" if setup.config.device != "cpu" and torch.cuda.is_available() else "cpu"
    device = _of_rank(torch.device(kind), setup.rank)
    group = TorchGroup(setup.rank, size, connect(setup.port, size), device)
    return group, load_computation(Path(setup.folder), setup.config, device, group).runner


def _of_rank(device: torch.device, rank: int) -> torch.device:
    """A GPU for each rank; ranks share a CPU."""
    if device.type != "cuda":
        return device
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)
