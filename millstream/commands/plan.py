"""`millstream plan`"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from millstream.errors import CommandError


def plan(
    *,
    model: str,
    gpu_memory: str = "24GiB",
    context: int = 4096,
    reserved: int | None = None,
    dtype: str = "float16",
    kv_dtype: str | None = None,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    json_output: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """How many sequences of a model fit a GPU: weights, KV, blocks, paged against contiguous.

    Args:
        model: a config.json, a folder with one, or an alias
        gpu_memory: of one GPU, such as 24GiB or 80GB
        context: tokens that each sequence comes to hold
        reserved: tokens that a contiguous cache would reserve for each; left out: the model's whole context
        dtype: of the weights: float32, float16, bfloat16, int8, fp8 or int4
        kv_dtype: of the KV; left out: as the weights
        gpu_memory_utilization: share of the memory that may be used
        block_size: tokens of a KV block
        json_output: one JSON line instead of the table
    """
    from engine.errors import EngineError
    from engine.models.families import decoder_config
    from engine.planner import GIB, parse_bytes, plan_capacity

    try:
        capacity = plan_capacity(
            decoder_config(json.loads(_config_path(model).read_text())),
            gpu_memory_bytes=parse_bytes(gpu_memory, "gpu-memory"),
            context_tokens=context,
            reserved_tokens=reserved,
            dtype=dtype,
            kv_dtype=kv_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            block_size=block_size,
        )
    except EngineError as error:
        raise CommandError(str(error)) from error
    except (OSError, ValueError) as error:
        raise CommandError(f"model: {model} has no readable config.json: {error}") from error
    if json_output:
        print(json.dumps(asdict(capacity)))
        return 0
    rows = (
        ("weights", f"{capacity.weight_bytes / GIB:.2f} GiB in {dtype}"),
        ("activations", f"{capacity.activation_bytes / GIB:.2f} GiB, estimated"),
        ("KV pool", f"{capacity.pool_bytes / GIB:.2f} GiB, {capacity.kv_bytes_per_token} bytes a token"),
        ("blocks", f"{capacity.num_blocks} of {block_size} tokens"),
        ("paged", f"{capacity.num_sequences_paged} sequences of {context} tokens"),
        ("contiguous", f"{capacity.num_sequences_contiguous} sequences, {capacity.kv_waste_contiguous:.0%} unused"),
    )
    for name, value in rows:
        print(f"{name:<12} {value}")
    return 0


def _config_path(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return path / "config.json"
    from engine.weights import resolve

    return resolve(model) / "config.json"
