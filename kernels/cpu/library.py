"""The compiled library's functions, and the structs that cross over to it (mirrored in model.h)."""

from __future__ import annotations

import ctypes
import functools
import math

import numpy as np
import numpy.typing as npt
import torch

from kernels.cpu.build import BuildUnavailable, Variant, build, usable_variants

PANEL = 32  # columns of a packed panel
CODE_GROUP = 32  # numbers of a row that share a scale in an int8 product
PHASES = ("norms", "qkv", "rope and write", "attention", "attention out", "gate and up", "down", "head")
MAX_HEAD_DIM = 256
MAX_GROUP = 48  # query heads of one KV head

_POINTER = ctypes.c_void_p


class Matrix(ctypes.Structure):
    _fields_ = (("panels", _POINTER), ("scales", _POINTER))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
        *((name, _POINTER) for name in ("query_norm", "key_norm")),
        ("qkv", Matrix),
        ("qkv_bias", _POINTER),
        *((name, Matrix) for name in ("attention_out", "gate_up", "down")),
        *((name, _POINTER) for name in ("cosine", "sine")),
        ("window", ctypes.c_int),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "intermediate")),
        *((name, ctypes.c_int) for name in ("num_layers", "vocab", "activation", "threads")),
        *((name, ctypes.c_float) for name in ("norm_eps", "attention_scale", "attention_softcap", "embedding_scale")),
        *((name, _POINTER) for name in ("embedding", "final_norm")),
        ("head", Matrix),
        ("layers", _POINTER),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("num_tokens", "num_rows", "num_logits", "block_size", "table_stride")),
        *((name, _POINTER) for name in ("token_ids", "positions", "row_starts", "tables", "logit_places")),
        *((name, _POINTER) for name in ("k_pools", "v_pools")),
        ("is_kv_coded", ctypes.c_int),
        ("logits", _POINTER),
        ("phase_ns", _POINTER),
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
        self._functions.ms_product.argtypes = (_POINTER, _POINTER, *(ctypes.c_int,) * 3, _POINTER)
        self._functions.ms_product.restype = None
        self._functions.ms_rivals.argtypes = (
            *(_POINTER, ctypes.c_long, ctypes.c_int, ctypes.c_int),
            *(_POINTER,) * 6,
        )
        self._functions.ms_rivals.restype = None
        for name in ("ms_multiply_floats", "ms_multiply_codes"):
            getattr(self._functions, name).argtypes = (ctypes.c_long, _POINTER)
            getattr(self._functions, name).restype = ctypes.c_double
        self._functions.ms_read_bytes.argtypes = (_POINTER, ctypes.c_long, _POINTER)
        self._functions.ms_read_bytes.restype = ctypes.c_double
        self._functions.ms_pack.argtypes = (_POINTER, ctypes.c_int, ctypes.c_int, _POINTER)
        self._functions.ms_pack.restype = None
        self._functions.ms_pack_int8.argtypes = (_POINTER, ctypes.c_int, ctypes.c_int, _POINTER)
        self._functions.ms_pack_int8.restype = None

    def open(self, model: Model) -> int:
        """A decoder over the model's weights; whatever the struct points at must outlive it."""
        return int(self._functions.ms_open(ctypes.byref(model)))

    def close(self, decoder: int) -> None:
        self._functions.ms_close(decoder)

    def forward(self, decoder: int, batch: Batch) -> None:
        self._functions.ms_forward(decoder, ctypes.byref(batch))

    def product(self, x: torch.Tensor, matrix: Matrix, out_size: int) -> torch.Tensor:
        """x [rows, in] fp32 -> [rows, out]: one product of a forward by itself, on one thread."""
        rows, in_size = x.shape
        y = torch.empty(rows, -(-out_size // PANEL) * PANEL)
        source = x.contiguous()
        self._functions.ms_product(ctypes.byref(matrix), source.data_ptr(), rows, in_size, out_size, y.data_ptr())
        return y[:, :out_size]

    def multiply_floats(self, rounds: int) -> float:
        """Fused multiply-adds from registers; returns their operations."""
        return float(self._functions.ms_multiply_floats(rounds, ctypes.byref(ctypes.c_float(0.25))))

    def multiply_codes(self, rounds: int) -> float:
        """The same of int8 products."""
        return float(self._functions.ms_multiply_codes(rounds, ctypes.byref(ctypes.c_float(0.25))))

    def read_bytes(self, data: torch.Tensor) -> float:
        """Reads a tensor's bytes in order; returns how many."""
        sink = ctypes.c_float(0)
        return float(self._functions.ms_read_bytes(data.data_ptr(), data.numel() * data.itemsize, ctypes.byref(sink)))

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """[out, in] fp32 -> [ceil(out / 32), in, 32], the columns beyond `out` zero."""
        out_size, in_size = weight.shape
        packed = aligned_empty((-(-out_size // PANEL), in_size, PANEL), torch.float32)
        source = weight.contiguous()
        self._functions.ms_pack(source.data_ptr(), out_size, in_size, packed.data_ptr())
        return packed

    def pack_int8(self, values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[out, in] int8, scales [out, 1] fp32 -> uint8 [ceil(out / 32), ceil(in / 32) * 8, 32, 4], scales
        [ceil(out / 32) * 32]; a byte is the value + 128, what is beyond `out` and `in` is a zero.
        """
        out_size, in_size = values.shape
        num_panels = -(-out_size // PANEL)
        packed = aligned_empty((num_panels, -(-in_size // CODE_GROUP) * CODE_GROUP // 4, PANEL, 4), torch.uint8)
        source = values.contiguous()
        self._functions.ms_pack_int8(source.data_ptr(), out_size, in_size, packed.data_ptr())
        padded_scales = aligned_empty((num_panels * PANEL,), torch.float32)
        padded_scales.zero_()[:out_size] = scales.view(-1)
        return packed, padded_scales

    def rivals(
        self,
        logits: npt.NDArray[np.float32],
        keys: npt.NDArray[np.uint32],
        scores: npt.NDArray[np.float32],
        inverse_scales: npt.NDArray[np.float32],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
        """Of each row of logits [rows, vocab] the tokens with word <= exp((logit - score) * inverse_scale).

        Returns their ids and words, row after row, ids ascending, and how many each row has.

        keys: [rows, 4], low and high word of the seed, output index, choice; the words are those of engine/noise.py.
        """
        rows, vocab = logits.shape
        if logits.strides[1] != 4:
            logits = np.ascontiguousarray(logits)
        ids, words = np.empty(rows * vocab, np.int32), np.empty(rows * vocab, np.uint32)
        counts = np.empty(rows, np.int32)
        inputs = [np.ascontiguousarray(each) for each in (keys, scores, inverse_scales)]
        self._functions.ms_rivals(
            *(logits.ctypes.data, logits.strides[0] // 4, rows, vocab),
            *(each.ctypes.data for each in (*inputs, ids, words, counts)),
        )
        total = int(counts.sum())
        return ids[:total], words[:total], counts


def aligned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """On a cache line's border: a panel's step then is two whole lines."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.empty(size + 63, dtype=torch.uint8)
    offset = -raw.data_ptr() % 64
    return raw[offset : offset + size].view(dtype).view(shape)


@functools.cache
def load() -> Library:
    """The best variant for this processor. Raises BuildUnavailable with the reason."""
    variants = usable_variants()
    if not variants:
        raise BuildUnavailable("this processor has none of AVX2, AVX-512 and NEON")
    return Library(variants[0])


def loaded() -> Library | None:
    """The library that this process has loaded already, if it has."""
    return load() if load.cache_info().currsize else None
