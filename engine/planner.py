"""Plans capacity before there is a GPU: what a model's weights and KV take, and how many sequences fit. Pure.

paged        a sequence holds the blocks of its own tokens, the last one partly empty
contiguous   a sequence reserves the longest context that the server allows, used or not
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import InvalidRequest
from engine.models.config import DecoderConfig

GIB = 1 << 30
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB}
DTYPE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}
_ACTIVATION_COPIES = 4  # of the widest row of a step that live at once: input, gate and up, product, residual


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes, blocks and sequences. Sequences are floors: so many fit whole."""

    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    pool_bytes: int
    block_size: int  # tokens
    num_blocks: int
    num_sequences_paged: int
    num_sequences_contiguous: int
    kv_waste_paged: float  # share of held KV that no token uses, at the context asked for
    kv_waste_contiguous: float


def parse_bytes(text: str, name: str) -> int:
    """ "24GiB", "80 GB" or "25769803776" -> bytes. Raises InvalidRequest naming `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMG]I?)?B?)\s*", text.upper())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise InvalidRequest(name, f"is {text!r}; write a size such as 24GiB or 80GB")
    return int(float(match[1]) * _UNITS[match[2]])


def num_parameters(config: DecoderConfig) -> int:
    """Weights of the decoder: embedding, layers, final norm, and the output matrix where it is its own."""
    hidden, head_dim = config.hidden_size, config.head_dim
    query, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention = hidden * (query + 2 * kv) + query * hidden
    mlp = 3 * hidden * config.intermediate_size
    norms = hidden * (4 if config.has_post_norms else 2)
    embedding = config.vocab_size * hidden
    return embedding * (1 if config.is_tied else 2) + config.num_layers * (attention + mlp + norms) + hidden


def kv_bytes_per_token(config: DecoderConfig, kv_dtype: str) -> int:
    return int(2 * config.num_layers * config.num_kv_heads * config.head_dim * DTYPE_BYTES[kv_dtype])


def plan_capacity(
    config: DecoderConfig,
    *,
    gpu_memory_bytes: int,
    context_tokens: int,
    reserved_tokens: int | None = None,
    dtype: str = "float16",
    kv_dtype: str | None = None,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 64,
) -> Capacity:
    """How many sequences of `context_tokens` fit, paged and with `reserved_tokens` (the model's context) reserved each.

    Raises InvalidRequest where a value is out of range or the weights alone do not fit.
    """
    _check(config, gpu_memory_utilization, context_tokens, dtype, kv_dtype or dtype)
    reserved = min(reserved_tokens or config.max_position, config.max_position)
    if reserved < context_tokens:
        raise InvalidRequest("reserved", f"is {reserved} tokens, less than the context of {context_tokens}")
    weight_bytes = int(num_parameters(config) * DTYPE_BYTES[dtype])
    widest = max(2 * config.intermediate_size, config.hidden_size)
    activation_bytes = 2 * _ACTIVATION_COPIES * max_num_batched_tokens * widest + 4 * max_num_seqs * config.vocab_size
    pool_bytes = int(gpu_memory_bytes * gpu_memory_utilization) - weight_bytes - activation_bytes
    per_token = kv_bytes_per_token(config, kv_dtype or dtype)
    num_blocks = pool_bytes // (per_token * block_size)
    if num_blocks < 1:
        raise InvalidRequest(
            "gpu_memory",
            f"leaves {pool_bytes / GIB:.1f} GiB for KV after {weight_bytes / GIB:.1f} GiB of weights and "
            f"{activation_bytes / GIB:.1f} GiB of activations; take a larger GPU or a smaller dtype",
        )
    blocks_each = -(-context_tokens // block_size)
    return Capacity(
        weight_bytes=weight_bytes,
        activation_bytes=activation_bytes,
        kv_bytes_per_token=per_token,
        pool_bytes=pool_bytes,
        block_size=block_size,
        num_blocks=num_blocks,
        num_sequences_paged=num_blocks // blocks_each,
        num_sequences_contiguous=pool_bytes // (per_token * reserved),
        kv_waste_paged=1 - context_tokens / (blocks_each * block_size),
        kv_waste_contiguous=1 - context_tokens / reserved,
    )


def _check(config: DecoderConfig, utilization: float, context_tokens: int, dtype: str, kv_dtype: str) -> None:
    if not 0 < utilization <= 1:
        raise InvalidRequest("gpu_memory_utilization", f"is {utilization}; give a share up to 1")
    if not 1 <= context_tokens <= config.max_position:
        raise InvalidRequest("context", f"is {context_tokens}; this model takes 1 to {config.max_position} tokens")
    for name, value in (("dtype", dtype), ("kv_dtype", kv_dtype)):
        if value not in DTYPE_BYTES:
            raise InvalidRequest(name, f"is {value!r}; choose one of {', '.join(DTYPE_BYTES)}")
