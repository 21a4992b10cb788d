"""From a model's config.json to DecoderConfig: one function per family, and what they share.

What a checkpoint shows by itself (biases, norms of queries and keys, fused matrices) is read from its tensors,
in `weights.py`; only what the numbers cannot show is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.errors import ModelLoadError
from engine.models.config import DecoderConfig, LayerConfig, RopeConfig

_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
_SLIDING, _FULL = "sliding_attention", "full_attention"

Fields = dict[str, Any]


def is_native(fields: Fields) -> bool:
    """Whether the decoder knows the family of this config.json."""
    return fields.get("model_type") in {*_FAMILIES, "gemma3"}


def decoder_config(fields: Fields) -> DecoderConfig:
    """`fields`: the parsed config.json. Raises ModelLoadError for a family or a feature that the decoder lacks."""
    family = fields.get("model_type")
    if family == "gemma3":  # the multimodal wrapper; its text part is a gemma3_text
        return decoder_config({"model_type": "gemma3_text", **fields["text_config"]})
    if family not in _FAMILIES:
        raise ModelLoadError(f"model_type {family!r} is not supported; supported: {', '.join(_FAMILIES)}")
    if fields.get("quantization_config"):
        raise ModelLoadError("pre-quantized checkpoints are not supported; use the original weights or a GGUF")
    try:
        return _FAMILIES[family]({**_DEFAULTS.get(family, {}), **fields})
    except KeyError as error:
        raise ModelLoadError(f"config.json lacks {error.args[0]!r}") from error


def _llama(fields: Fields) -> DecoderConfig:
    return _base(fields, [None] * fields["num_hidden_layers"])


def _mistral(fields: Fields) -> DecoderConfig:
    return _base(fields, [fields.get("sliding_window")] * fields["num_hidden_layers"])


def _qwen(fields: Fields) -> DecoderConfig:
    if not fields.get("use_sliding_window"):
        return _base(fields, [None] * fields["num_hidden_layers"])
    first = fields.get("max_window_layers", 28)
    kinds = fields.get("layer_types") or [_SLIDING if i >= first else _FULL for i in range(fields["num_hidden_layers"])]
    return _base(fields, _windows(fields, kinds))


def _phi3(fields: Fields) -> DecoderConfig:
    return _base(fields, [fields.get("sliding_window")] * fields["num_hidden_layers"])


def _gemma2(fields: Fields) -> DecoderConfig:
    kinds = fields.get("layer_types") or [_FULL if i % 2 else _SLIDING for i in range(fields["num_hidden_layers"])]
    return _as_gemma(_base(fields, _windows(fields, kinds)), fields)


def _gemma3(fields: Fields) -> DecoderConfig:
    every = fields.get("sliding_window_pattern", 6)
    kinds = fields.get("layer_types") or [
        _SLIDING if (i + 1) % every else _FULL for i in range(fields["num_hidden_layers"])
    ]
    config = _as_gemma(_base(fields, _windows(fields, kinds)), fields)
    rotary_dim = config.head_dim
    written = fields.get("rope_parameters") or {}
    local = written.get(_SLIDING) or {"rope_theta": fields.get("rope_local_base_freq", 10_000.0)}
    whole = written.get(_FULL) or {"rope_theta": fields.get("rope_theta", 1e6), **(fields.get("rope_scaling") or {})}
    return replace(
        config,
        ropes=(_rope(whole, rotary_dim, fields), _rope(local, rotary_dim, fields)),
        layers=tuple(
            LayerConfig(layer.window, rope=int(kind == _SLIDING))
            for layer, kind in zip(config.layers, kinds, strict=True)
        ),
    )


_FAMILIES: dict[str, Callable[[Fields], DecoderConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}

_GEMMA_DEFAULTS: Fields = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
# What published config.json files of a family leave out.
_DEFAULTS: dict[str, Fields] = {
    "mistral": {"sliding_window": 4096},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        **_GEMMA_DEFAULTS,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {**_GEMMA_DEFAULTS, "vocab_size": 262_208, "max_position_embeddings": 131_072},
}


def _base(fields: Fields, windows: list[int | None]) -> DecoderConfig:
    """What all families share."""
    num_heads = fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // num_heads
    activation = fields.get("hidden_activation") or fields.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ModelLoadError(f"activation {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    written = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if _FULL in written:  # the same for both kinds of layer, except in Gemma 3, which reads them itself
        written = written[_FULL]
    partial = written.get("partial_rotary_factor", fields.get("partial_rotary_factor")) or 1.0
    parameters = {"rope_theta": fields.get("rope_theta") or 10_000.0, **written}
    return DecoderConfig(
        family=fields["model_type"],
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_position=fields["max_position_embeddings"],
        norm_eps=fields["rms_norm_eps"],
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        ropes=(_rope(parameters, int(head_dim * partial), fields),),
        layers=tuple(LayerConfig(window, rope=0) for window in windows),
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        attention_scale=head_dim**-0.5,
    )


def _as_gemma(config: DecoderConfig, fields: Fields) -> DecoderConfig:
    if fields.get("use_bidirectional_attention"):
        raise ModelLoadError("bidirectional attention (an embedding model) is not supported")
    return replace(
        config,
        attention_scale=fields["query_pre_attn_scalar"] ** -0.5,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        has_post_norms=True,
        attention_softcap=fields.get("attn_logit_softcapping"),
        logit_softcap=fields.get("final_logit_softcapping"),
    )


def _windows(fields: Fields, kinds: list[str]) -> list[int | None]:
    unknown = set(kinds) - {_SLIDING, _FULL}
    if unknown:
        raise ModelLoadError(f"layer types {', '.join(sorted(unknown))} are not supported")
    return [fields["sliding_window"] if kind == _SLIDING else None for kind in kinds]


def _rope(parameters: Fields, rotary_dim: int, fields: Fields) -> RopeConfig:
    """`parameters` in today's form (rope_type, rope_theta, ...) or the older one (type)."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if fields["model_type"] == "phi3" and kind in ("su", "yarn"):  # what early Phi-3 files call longrope
        kind = "longrope"
    if kind not in _ROPE_KINDS:
        raise ModelLoadError(f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    original = fields.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    found = {
        **parameters,
        "max_position_embeddings": fields["max_position_embeddings"],
        "original_max_position_embeddings": original or fields["max_position_embeddings"],
    }
    return RopeConfig(kind, float(parameters["rope_theta"]), rotary_dim, found)
