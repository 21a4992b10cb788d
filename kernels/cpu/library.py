"""The compiled library's functions, and the structs that cross over to it (mirrored in model.h)."""

from __future__ import annotations

import ctypes
import functools
import math
from enum import IntEnum

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


class Form(IntEnum):
    """How a matrix is kept. All but CODES give back what was packed; int8 products take CODES and GROUPED4."""

    FLOATS = 0
    HALVES = 1  # the upper 16 bits of each: a checkpoint in bfloat16
    GROUPED8 = 2  # scale * q + offset, 32 inputs of an output having one scale and offset: GGUF's Q8_0
    GROUPED4 = 3  # the same with 4 bits: GGUF's Q4_0 and Q4_1
    CODES = 4  # int8 with a scale for each output; the other factor is rounded to int8 too
    NEAR4 = 5  # GROUPED4 whose offsets are zero or a quarter of their scales at least: it becomes floats faster


class Matrix(ctypes.Structure):
    _fields_ = (("panels", _POINTER), ("scales", _POINTER), ("form", ctypes.c_int))


_SMALLEST_FIRST = (Form.NEAR4, Form.GROUPED4, Form.GROUPED8, Form.HALVES, Form.FLOATS)


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
        *((name, ctypes.c_int) for name in ("num_layers", "vocab", "activation", "threads", "is_coded")),
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
        ("best", _POINTER),
        ("phase_ns", _POINTER),
    )


class Library:
    """One variant, loaded. Calls release Python's global lock."""

    def __init__(self, variant: Variant) -> None:
        path = build(variant)
        self.variant, self.name = variant, path.stem  # the name changes with the sources
        self._functions = ctypes.CDLL(str(path))
        self._functions.ms_open.restype = _POINTER
        self._functions.ms_open.argtypes = (_POINTER,)
        self._functions.ms_close.argtypes = (_POINTER,)
        self._functions.ms_close.restype = None
        self._functions.ms_forward.argtypes = (_POINTER, _POINTER)
        self._functions.ms_forward.restype = None
        self._functions.ms_product.argtypes = (_POINTER, _POINTER, *(ctypes.c_int,) * 4, _POINTER)
        self._functions.ms_product.restype = None
        self._functions.ms_rivals.argtypes = (
            *(_POINTER, ctypes.c_long, ctypes.c_int, ctypes.c_int),
            *(_POINTER,) * 6,
        )
        self._functions.ms_rivals.restype = None
        for name in ("ms_multiply_floats", "ms_multiply_codes", "ms_multiply_codes4"):
            getattr(self._functions, name).argtypes = (ctypes.c_long, _POINTER)
            getattr(self._functions, name).restype = ctypes.c_double
        self._functions.ms_read_bytes.argtypes = (_POINTER, ctypes.c_long, _POINTER)
        self._functions.ms_read_bytes.restype = ctypes.c_double
        self._functions.ms_panel_bytes.argtypes = (ctypes.c_int, ctypes.c_int)
        self._functions.ms_panel_bytes.restype = ctypes.c_long
        self._functions.ms_pack.argtypes = (_POINTER, *(ctypes.c_int,) * 3, _POINTER)
        self._functions.ms_pack.restype = ctypes.c_int
        self._functions.ms_pack_int8.argtypes = (_POINTER, ctypes.c_int, ctypes.c_int, _POINTER)
        self._functions.ms_pack_int8.restype = None

    def open(self, model: Model) -> int:
        """A decoder over the model's weights; whatever the struct points at must outlive it."""
        return int(self._functions.ms_open(ctypes.byref(model)))

    def close(self, decoder: int) -> None:
        self._functions.ms_close(decoder)

    def forward(self, decoder: int, batch: Batch) -> None:
        self._functions.ms_forward(decoder, ctypes.byref(batch))

    def product(self, x: torch.Tensor, matrix: Matrix, out_size: int, is_coded: bool) -> torch.Tensor:
        """x [rows, in] fp32 -> [rows, out]: a product of a forward, on one thread; is_coded: with x in int8."""
        rows, in_size = x.shape
        y = torch.empty(rows, -(-out_size // PANEL) * PANEL)
        source, sizes = x.contiguous(), (rows, in_size, out_size)
        self._functions.ms_product(ctypes.byref(matrix), source.data_ptr(), *sizes, is_coded, y.data_ptr())
        return y[:, :out_size]

    def multiply_floats(self, rounds: int) -> float:
        """Fused multiply-adds from registers; returns their operations."""
        return float(self._functions.ms_multiply_floats(rounds, ctypes.byref(ctypes.c_float(0.25))))

    def multiply_codes(self, rounds: int) -> float:
        """The same of int8 products."""
        return float(self._functions.ms_multiply_codes(rounds, ctypes.byref(ctypes.c_float(0.25))))

    def multiply_codes4(self, rounds: int) -> float:
        """The same of int8 with weights of 4 bits."""
        return float(self._functions.ms_multiply_codes4(rounds, ctypes.byref(ctypes.c_float(0.25))))

    def read_bytes(self, data: torch.Tensor) -> float:
        """Reads a tensor's bytes in order; returns how many."""
        sink = ctypes.c_float(0)
        return float(self._functions.ms_read_bytes(data.data_ptr(), data.numel() * data.itemsize, ctypes.byref(sink)))

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, Form]:
        """[out, in] fp32 -> its panels, [ceil(out / 32), bytes of one] uint8, and the smallest form that keeps all its
        floats to the bit."""
        source = weight.contiguous()
        for form in _SMALLEST_FIRST:
            if (packed := self.pack_as(form, source)) is not None:
                return packed, form
        raise AssertionError("floats can be kept as floats")

    def pack_as(self, form: Form, weight: torch.Tensor) -> torch.Tensor | None:
        """The panels in a form for floats, columns beyond `out` zero; None where it would not give back every float."""
        out_size, in_size = weight.shape
        if form in (Form.NEAR4, Form.GROUPED4, Form.GROUPED8) and in_size % CODE_GROUP:
            return None
        packed = aligned_empty((-(-out_size // PANEL), self._functions.ms_panel_bytes(form, in_size)), torch.uint8)
        source = weight.contiguous()
        is_exact = self._functions.ms_pack(source.data_ptr(), out_size, in_size, form, packed.data_ptr())
        return packed if is_exact else None

    def pack_int8(self, values: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[out, in] int8, scales [out, 1] fp32 -> panels [ceil(out / 32), bytes of one] uint8 of Form.CODES, what is
        beyond `out` and `in` zero, and scales [ceil(out / 32) * 32].
        """
        out_size, in_size = values.shape
        num_panels = -(-out_size // PANEL)
        packed = aligned_empty((num_panels, self._functions.ms_panel_bytes(Form.CODES, in_size)), torch.uint8)
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
