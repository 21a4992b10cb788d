"""How many blocks fit a GPU: what `gpu_memory_utilization` allows, less what the largest step was seen to take.

0 ......................... total * utilization .......... total
| others | weights | largest step | graphs | KV pool | free |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.cuda.buckets import Bucket
from engine.cuda.device_sampler import DeviceSampler
from engine.errors import InvalidConfig
from engine.kv_storage import KVStorage
from engine.models.decoder import Decoder
from engine.models.transformers_fallback import TransformersDecoder
from engine.params import SamplingParams
from engine.sampler import Draw
from engine.sequence import Request, Sequence
from kernels.paged_attention.rows import PagedRows

_FP32_BYTES = 4
_SPLIT_LEN = 256  # keys of one program of decode attention


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """In bytes."""

    total: int  # of the GPU
    others: int  # taken by other processes, and by what torch does not count
    peak: int  # weights, and the largest step with its draws

    def kv_budget(self, utilization: float, reserved: int) -> int:
        """Bytes for the KV pool. `reserved`: for graphs. Raises InvalidConfig where nothing is left."""
        budget = math.floor(self.total * utilization) - self.others - self.peak - reserved
        if budget <= 0:
            raise InvalidConfig(
                "gpu_memory_utilization",
                f"is {utilization}: of {self.total} bytes, other programs take {self.others}, weights and the largest "
                f"step {self.peak}, graphs {reserved}, and nothing is left for KV; raise it, lower "
                "max_num_batched_tokens or max_num_seqs, or free the GPU",
            )
        return budget


def graph_bytes(bucket: Bucket, num_heads: int, num_kv_heads: int, head_dim: int, vocab_size: int) -> int:
    """An estimate for all graphs, which share their memory: the largest one's split attention and its logits."""
    num_pairs = bucket.num_rows * (num_heads // num_kv_heads)
    num_splits = -(-bucket.context_len // _SPLIT_LEN)
    partial = num_pairs * num_kv_heads * num_splits * (head_dim + 2) * _FP32_BYTES
    return partial + 3 * bucket.num_rows * vocab_size * _FP32_BYTES


def measured_use(
    decoder: Decoder | TransformersDecoder,
    max_model_len: int,
    config: EngineConfig,
    dtype: torch.dtype,
    sampler: DeviceSampler,
) -> MemoryUse:
    """Runs the largest step that the settings allow, with the draws that need the most memory."""
    device = decoder.device
    num_blocks = num_profiled_blocks(max_model_len, config)
    kv = KVStorage(decoder.config, config.block_size, num_blocks, 0, dtype, device)
    torch.cuda.reset_peak_memory_stats(device)
    logits = decoder.forward(largest_batch(max_model_len, config, device), kv)
    sampler.draw(logits, _costly_draws(len(logits))).result()
    kv_bytes = kv.pool.numel() * kv.pool.itemsize
    del kv, logits
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(
        total=total,
        others=total - free - torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device) - kv_bytes,
    )


def largest_batch(max_model_len: int, config: EngineConfig, device: torch.device) -> Batch:
    """Prefills of as many tokens as a step may have, with the most logits that sampling may want."""
    num_tokens, size = config.max_num_batched_tokens, config.block_size
    starts = list(range(0, num_tokens, max_model_len))  # a context ends where the model's does
    lens = [min(max_model_len, num_tokens - start) for start in starts]
    blocks = iter(range(num_profiled_blocks(max_model_len, config)))
    tables = [[next(blocks) for _ in range(-(-length // size))] for length in lens]
    slots = [
        table[at // size] * size + at % size for table, length in zip(tables, lens, strict=True) for at in range(length)
    ]
    places = torch.arange(num_tokens, device=device)
    rows = PagedRows([*starts, num_tokens], lens, tables, size)
    return Batch(
        torch.zeros_like(places),
        places % max_model_len,
        torch.tensor(slots, device=device),
        places[-config.max_num_seqs :],
        rows,
    )


def num_profiled_blocks(max_model_len: int, config: EngineConfig) -> int:
    """Blocks that `largest_batch` writes: whole ones for each of its contexts."""
    num_tokens, size = config.max_num_batched_tokens, config.block_size
    num_whole, rest = divmod(num_tokens, max_model_len)
    return num_whole * -(-max_model_len // size) + -(-rest // size)


def _costly_draws(count: int) -> list[Draw]:
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)
    request = Request("profile", [0], params, seed=0)
    return [Draw(place, Sequence(request, 0, 0)) for place in range(count)]
