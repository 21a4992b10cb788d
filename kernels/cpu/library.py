"""The compiled library's functions, and the structs that cross over to it (mirrored in forward.cpp)."""

from __future__ import annotations

import ctypes
import functools

import torch

from kernels.cpu.build import BuildUnavailable, Variant, build, usable_variants

PANEL = 32  # columns of a packed panel
MAX_HEAD_DIM = 256
MAX_GROUP = 48  # query heads of one KV head

_POINTER = ctypes.c_void_p


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
        *((name, _POINTER) for name in ("query_norm", "key_norm", "qkv", "qkv_bias", "attention_out")),
        *((name, _POINTER) for name in ("gate_up", "down", "cosine", "sine")),
        ("window", ctypes.c_int),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "intermediate")),
        *((name, ctypes.c_int) for name in ("num_layers", "vocab", "activation", "threads")),
        *((name, ctypes.c_float) for name in ("norm_eps", "attention_scale", "attention_softcap", "embedding_scale")),
        *((name, _POINTER) for name in ("embedding", "final_norm", "head", "layers")),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_tokens", "num_rows", "num_logits", "block_size", "table_stride")),
        *((name, _POINTER) for name in ("token_ids", "positions", "row_starts", "tables", "logit_places")),
        *((name, _POINTER) for name in ("k_pools", "v_pools", "logits")),
    )


class Library:
    """One variant, loaded. Calls release Python's global lock."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._functions = ctypes.CDLL(str(build(variant)))
        self._functions.ms_open.restype = _POINTER
        self._functions.ms_open.argtypes = (_POINTER,)
        self._functions.ms_close.argtypes = (_POINTER,)
        self._functions.ms_close.restype = None
        self._functions.ms_forward.argtypes = (_POINTER, _POINTER)
        self._functions.ms_forward.restype = None
        self._functions.ms_pack.argtypes = (_POINTER, ctypes.c_int, ctypes.c_int, _POINTER)
        self._functions.ms_pack.restype = None

    def open(self, model: Model) -> int:
        """A decoder over the model's weights; whatever the struct points at must outlive it."""
        return int(self._functions.ms_open(ctypes.byref(model)))

    def close(self, decoder: int) -> None:
        self._functions.ms_close(decoder)

    def forward(self, decoder: int, batch: Batch) -> None:
        self._functions.ms_forward(decoder, ctypes.byref(batch))

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """[out, in] fp32 -> [ceil(out / 32), in, 32], the columns beyond `out` zero."""
        out_size, in_size = weight.shape
        packed = aligned_empty((-(-out_size // PANEL), in_size, PANEL))
        source = weight.contiguous()
        self._functions.ms_pack(source.data_ptr(), out_size, in_size, packed.data_ptr())
        return packed


def aligned_empty(shape: tuple[int, ...]) -> torch.Tensor:
    """fp32, on a cache line's border: a panel's step then is two whole lines."""
    size = 1
    for length in shape:
        size *= length
    raw = torch.empty(size + 15, dtype=torch.float32)
    offset = (-raw.data_ptr() % 64) // 4
    return raw[offset : offset + size].view(shape)


@functools.cache
def load() -> Library:
    """The best variant for this processor. Raises BuildUnavailable with the reason."""
    variants = usable_variants()
    if not variants:
        raise BuildUnavailable("this processor has none of AVX2, AVX-512 and NEON")
    return Library(variants[0])
