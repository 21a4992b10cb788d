"""Chooses what computes a model: our decoder, on the native CPU path or on torch, or else transformers'."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import InvalidConfig
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.families import decoder_config, is_native
from engine.models.native import NativeDecoder, why_not
from engine.models.packed import WeightsDtype
from engine.models.panels_file import PanelsFile, source_of
from engine.models.quantized import quantize
from engine.models.transformers_fallback import TransformersDecoder
from engine.models.weights import DecoderWeights, load_weights
from engine.parallel.group import RankGroup
from engine.parallel.shard import Shard
from engine.weights.safetensors import Checkpoint
from kernels.cpu import library
from kernels.cpu.build import BuildUnavailable

log = logging.getLogger(__name__)

AnyDecoder = Decoder | NativeDecoder | TransformersDecoder


def load_decoder(
    folder: Path,
    fields: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    group: RankGroup | None = None,
) -> tuple[AnyDecoder, int]:
    """The decoder of a model folder, and the context that it serves. `fields`: the parsed config.json; `group`: the
    ranks that share it.

    Raises ModelLoadError for a model that cannot be used, InvalidConfig for settings that do not fit it.
    """
    if is_native(fields):
        decoder_fields = decoder_config(fields)
        can_stretch = all(rope.kind == "dynamic" for rope in decoder_fields.ropes)
        max_model_len = _max_model_len(config, decoder_fields.max_position, can_stretch)
        panels = None if group is not None else _panels(folder, dtype, device, config)
        if panels is not None and (packed := panels.read()) is not None:
            native = NativeDecoder(decoder_fields, packed, max_model_len, config.num_threads, _products(config))
            return native, max_model_len
        weights = load_weights(Checkpoint(folder), decoder_fields, dtype, device, group)
        if group is not None:
            own_share = Shard(group.rank, group.size).config(decoder_fields)
            return Decoder(own_share, weights, max_model_len, device), max_model_len
        decoder = _own_decoder(decoder_fields, weights, max_model_len, device, config)
        if panels is not None and isinstance(decoder, NativeDecoder):
            panels.keep(decoder.packed)
        return decoder, max_model_len
    if config.cpu_kernels == "native":
        raise InvalidConfig("cpu_kernels", f"is native, which knows no {fields.get('model_type')}; use auto")
    if config.dtype == "int4":
        raise InvalidConfig("dtype", f"is int4, and {fields.get('model_type')} runs through transformers; use auto")
    _refuse_int8(config, f"knows no {fields.get('model_type')}")
    foreign = TransformersDecoder(folder, dtype, device)
    return foreign, _max_model_len(config, foreign.config.max_position, can_stretch=False)


def _panels(folder: Path, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> PanelsFile | None:
    """Where the native path's panels are kept; None where that path is not wanted, or the folder keeps none."""
    is_wanted = device.type == "cpu" and dtype == torch.float32 and config.cpu_kernels != "torch"
    source = source_of(folder) if is_wanted and config.dtype != "int4" else None
    if source is None:
        return None
    try:
        return PanelsFile(folder, source, library.load(), _products(config))
    except BuildUnavailable:  # told where the decoder is made
        return None


def _products(config: EngineConfig) -> WeightsDtype:
    return "int8" if config.dtype == "int8" else "float32"


def _own_decoder(
    fields: DecoderConfig, weights: DecoderWeights, max_model_len: int, device: torch.device, config: EngineConfig
) -> Decoder | NativeDecoder:
    """The native path where it can run the model and is wanted, else torch; the log says why."""
    if config.dtype == "int4" and device.type != "cuda":
        raise InvalidConfig("dtype", f"is int4, which GPUs alone compute with, and the device is {device}; use auto")
    reason = "is not wanted" if config.cpu_kernels == "torch" else why_not(fields, weights, device)
    if reason is None:
        try:
            return NativeDecoder(fields, weights, max_model_len, config.num_threads, _products(config))
        except BuildUnavailable as error:
            reason = f"cannot be built: {error}"
            log.warning("torch computes, several times slower: the native CPU path %s", reason)
    if config.cpu_kernels == "native":
        raise InvalidConfig("cpu_kernels", f"is native, and the native path {reason}; use auto")
    if device.type == "cuda" and (config.dtype == "int8" or config.dtype == "int4"):
        _refuse_int8(replace(config, dtype="auto"), reason)
        chosen = quantize(weights, config.dtype, is_invariant=config.numerics != "fast")
        log.info("matrices in %s: %s", config.dtype, chosen)
        decoder = Decoder(fields, weights, max_model_len, device)
        if config.numerics == "fast":
            decoder.kernels += "-fast"  # other tiles for few rows than for many: other bits
        return decoder
    _refuse_int8(config, reason)
    log.info("torch computes: the native CPU path %s", reason)
    return Decoder(fields, weights, max_model_len, device)


def _max_model_len(config: EngineConfig, own: int, can_stretch: bool) -> int:
    """The model's context or the config's shorter one; only dynamic rope may be stretched beyond the model's."""
    wanted = config.max_model_len or own
    if wanted > own and not can_stretch:
        raise InvalidConfig("max_model_len", f"is {wanted} and the model's context is {own}; lower it")
    return wanted


def _refuse_int8(config: EngineConfig, reason: str) -> None:
    """`reason`: why the native CPU path does not run."""
    for name in ("dtype", "kv_cache_dtype"):
        if getattr(config, name) == "int8":
            raise InvalidConfig(name, f"is int8, which the native CPU path alone has, and it {reason}; use auto")
