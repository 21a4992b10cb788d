"""The decoder on the native CPU path: the same model as `decoder.Decoder`, one call for a whole forward.

The pool's blocks are laid out as the native attention reads them: of one layer's block, keys [kv head, head dim,
position in block] and values [kv head, position in block, head dim]; in int8, each head's part is followed by the fp32
scales of its tokens. Nobody else reads them. Decoders of one model share a pool, whatever the type of their products:
an int8 copy may draft into the slots of a float32 target.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.kv_storage import KVStorage
from engine.models.config import DecoderConfig
from engine.models.packed import MATRICES, NORMS, PackedWeights, WeightsDtype, pack
from engine.models.rope import rope_table
from engine.models.weights import DecoderWeights
from kernels.cpu import library
from kernels.cpu.library import MAX_GROUP, MAX_HEAD_DIM, PANEL

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class _Pools(NamedTuple):
    """Where each layer's keys and values lie."""

    arrays: tuple[ctypes.Array[ctypes.c_void_p], ...]  # keeps what the next two point at
    keys: int
    values: int
    is_coded: bool  # int8


def why_not(config: DecoderConfig, weights: DecoderWeights, device: torch.device) -> str | None:
    """Why the native path cannot run this model, or None where it can. Does not ask for a compiler."""
    if device.type != "cpu":
        return f"runs on the CPU only, not on {device.type}"
    if weights.embedding.dtype != torch.float32:
        return f"computes in float32, not in {weights.embedding.dtype}"
    if config.head_dim % 16 or config.head_dim > MAX_HEAD_DIM:
        return f"needs a head_dim that is a multiple of 16 up to {MAX_HEAD_DIM}, not {config.head_dim}"
    if config.num_heads // config.num_kv_heads > MAX_GROUP:
        return f"needs at most {MAX_GROUP} query heads for a KV head"
    biased = [linear for layer in weights.layers for linear in (layer.attention_out, layer.gate_up, layer.down)]
    if any(linear.bias is not None for linear in biased):
        return "knows biases of q, k and v only"
    return None


class NativeDecoder:
    """Weights packed for the native path, and its threads. Raises BuildUnavailable where it cannot be compiled."""

    kernels = "native-4"  # changes whenever the arithmetic does; the instruction set does not matter
    index_dtype = torch.int32

    def __init__(
        self,
        config: DecoderConfig,
        weights: DecoderWeights | PackedWeights,
        max_model_len: int,
        num_threads: int | None,
        dtype: WeightsDtype = "float32",
    ) -> None:
        """dtype: of the products; `weights` are float32 for either, or packed for it already."""
        self.config = config
        self.device = torch.device("cpu")
        self._library = library.load()
        self._num_threads = num_threads or len(os.sched_getaffinity(0))
        self._is_coded = dtype == "int8"
        if not isinstance(weights, PackedWeights):
            weights = pack(weights, self._library, dtype, self._num_threads)
        self.packed = weights
        self._pools: weakref.WeakKeyDictionary[KVStorage, _Pools] = weakref.WeakKeyDictionary()
        self._decoder = self._library.open(self._build(max_model_len))
        self.best_ids: npt.NDArray[np.int32] | None = None
        self._closed = weakref.finalize(self, self._library.close, self._decoder)
        self.choices = {
            "forward": f"forward: native {self._library.variant.name} on {self._num_threads} threads, {dtype}, "
            f"invariant: the fused path for a CPU; matrices kept as {self.packed.kept()}"
        }

    def forward(self, batch: Batch, kv: KVStorage, phase_ns: npt.NDArray[np.int64] | None = None) -> torch.Tensor:
        """Logits [len(batch.logit_places), vocab], fp32; writes the batch's keys and values into `kv`.

        `best_ids` then are those of each row's largest logit, as `rows.largest` has it; None under a softcap, which may
        make different logits equal.

        phase_ns: [len(library.PHASES)], to which the first thread's time in each phase is added.
        """
        rows, config = batch.rows, self.config
        padded_vocab = -(-config.vocab_size // PANEL) * PANEL
        logits = torch.empty(len(batch.logit_places), padded_vocab)
        best_ids = np.empty(len(logits), dtype=np.int32)
        tables = np.zeros((len(rows), max(map(len, rows.block_tables))), dtype=np.int32)
        for table, block_ids in zip(tables, rows.block_tables, strict=True):
            table[: len(block_ids)] = block_ids
        pools = self._pools_of(kv)
        inputs = [each.to(self.index_dtype) for each in (batch.token_ids, batch.positions, batch.logit_places)]
        row_starts = np.array(rows.query_starts, dtype=np.int32)
        token_ids, positions, logit_places = (each.data_ptr() for each in inputs)
        self._library.forward(
            self._decoder,
            library.Batch(
                *(len(batch.token_ids), len(rows), len(logits), rows.block_size, tables.shape[1]),
                *(token_ids, positions, _address(row_starts), _address(tables), logit_places),
                *(pools.keys, pools.values, pools.is_coded),
                *(logits.data_ptr(), _address(best_ids), 0 if phase_ns is None else _address(phase_ns)),
            ),
        )
        if padded_vocab != config.vocab_size:
            logits = logits[:, : config.vocab_size]
        self.best_ids = None if config.logit_softcap is not None else best_ids
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits

    def _pools_of(self, kv: KVStorage) -> _Pools:
        if (known := self._pools.get(kv)) is not None:
            return known
        layers = [kv.layer(index) for index in range(self.config.num_layers)]
        pointers = ctypes.c_void_p * len(layers)
        arrays = tuple(pointers(*(layer[part].data_ptr() for layer in layers)) for part in (0, 1))
        self._pools[kv] = found = _Pools(
            *(arrays, ctypes.addressof(arrays[0]), ctypes.addressof(arrays[1])), layers[0][0].dtype == torch.int8
        )
        return found

    def _build(self, max_model_len: int) -> library.Model:
        config, packed = self.config, self.packed
        self._angles = [
            (table[:, 0].contiguous(), table[:, 1].contiguous())
            for table in (rope_table(kind, max_model_len) for kind in config.ropes)
        ]
        self._layers = (library.Layer * config.num_layers)(*map(self._layer, range(config.num_layers)))
        return library.Model(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rotary_dim=config.ropes[0].rotary_dim,
            intermediate=config.intermediate_size,
            num_layers=config.num_layers,
            vocab=config.vocab_size,
            activation=_ACTIVATIONS[config.activation],
            threads=self._num_threads,
            is_coded=self._is_coded,
            norm_eps=config.norm_eps,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap or 0.0,
            embedding_scale=config.embedding_scale,
            embedding=packed.address("embedding"),
            final_norm=packed.address("final_norm"),
            head=packed.matrix("head"),
            layers=ctypes.cast(self._layers, ctypes.c_void_p),
        )

    def _layer(self, index: int) -> library.Layer:
        kind, prefix = self.config.layers[index], f"layers.{index}."
        cosine, sine = self._angles[kind.rope]
        return library.Layer(
            **{name: self.packed.address(f"{prefix}{name}") for name in (*NORMS, "qkv_bias")},
            **{name: self.packed.matrix(f"{prefix}{name}") for name in MATRICES},
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            window=kind.window or 0,
        )


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])  # `array.ctypes` takes several times as long
