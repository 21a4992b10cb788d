"""Puts a GPU runner together for a loaded decoder."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.cuda.buckets import Buckets
from engine.cuda.device import Device
from engine.cuda.device_sampler import DeviceSampler
from engine.cuda.profiling import graph_bytes, measured_use
from engine.cuda.runner import CudaRunner
from engine.errors import InvalidConfig
from engine.kv_storage import KVStorage, block_bytes, num_blocks_within
from engine.models.decoder import Decoder
from engine.models.native import NativeDecoder
from engine.models.transformers_fallback import TransformersDecoder
from engine.parallel.group import RankGroup

log = logging.getLogger(__name__)

GIB = 1 << 30


def cuda_runner(
    device: Device,
    decoder: Decoder | NativeDecoder | TransformersDecoder,
    max_model_len: int,
    config: EngineConfig,
    dtype: torch.dtype,
    group: RankGroup | None = None,
) -> CudaRunner:
    """Raises InvalidConfig where the settings leave no room for KV."""
    if isinstance(decoder, NativeDecoder):
        raise InvalidConfig("cpu_kernels", "is native, which computes on the CPU only; use auto")
    buckets = Buckets(config.max_num_seqs, max_model_len) if config.cuda_graphs else None
    sampler = DeviceSampler(device)
    bytes_per_block = block_bytes(decoder.config, config.block_size, dtype)
    num_blocks = config.num_kv_blocks or num_blocks_within(
        config.kv_cache_memory_bytes or _profiled_budget(decoder, max_model_len, config, dtype, sampler, buckets),
        bytes_per_block,
    )
    if group is not None:
        num_blocks = group.least(num_blocks)  # a block is in the same place on every rank
    num_host_slots = int(config.swap_space * GIB) // bytes_per_block
    kv = KVStorage(decoder.config, config.block_size, num_blocks, num_host_slots, dtype, decoder.device)
    runner = CudaRunner(
        device,
        decoder,
        kv,
        sampler,
        max_model_len=max_model_len,
        block_size=config.block_size,
        buckets=buckets,
    )
    log.info("GPU runner: %d blocks, %d host slots; %s", num_blocks, num_host_slots, "; ".join(runner.choices.values()))
    return runner


def _profiled_budget(
    decoder: Decoder | TransformersDecoder,
    max_model_len: int,
    config: EngineConfig,
    dtype: torch.dtype,
    sampler: DeviceSampler,
    buckets: Buckets | None,
) -> int:
    reserved = 0
    if buckets is not None and isinstance(decoder, Decoder):
        shape = decoder.config
        reserved = graph_bytes(buckets.largest, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size)
    return measured_use(decoder, max_model_len, config, dtype, sampler).kv_budget(
        config.gpu_memory_utilization, reserved
    )
