"""Makes tiny models with random weights: the same files as a published model has, a few hundred kB, in milliseconds.

The numbers are seeded, so two calls with the same arguments write the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Pieces that the tiny tokenizer joins, in order: enough for tokens of several bytes, some ending inside a character.
_MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("in", "g"),
    ("a", "n"),
    ("an", "d"),
    ("Ġ", "and"),
    ("s", "t"),
    ("ð", "Ł"),
    ("ðŁ", "ĺ"),
    ("æ", "¼"),
    (".", "Ċ"),
    ("Ġ", "Ġ"),
]

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}
_GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
    "sliding_window": 24,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 24},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        **_GEMMA,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        **_GEMMA,
        "rope_theta": 100000.0,
        "rope_local_base_freq": 5000.0,
        "sliding_window_pattern": 3,
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "sliding_window": 24},
}
_FUSED = {"phi3"}
_QK_NORM = {"qwen3", "gemma3_text"}
_QKV_BIAS = {"qwen2"}
_POST_NORMS = {"gemma2", "gemma3_text"}


def make_tiny_model(
    folder: Path, family: str = "llama", *, seed: int = 0, overrides: dict[str, Any] | None = None
) -> Path:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json into `folder` and returns it.

    `overrides` replaces fields of config.json; None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"model_type": family, **_BASE, **FAMILIES[family], **(overrides or {})}
    config = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_weights(folder, config, seed)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A byte-level tokenizer: 3 special tokens, 256 bytes, a few merges, then tokens that no text yields."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in _MERGES)]
    pieces += [f"unused{index}" for index in range(vocab_size - len(pieces))]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=_MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _write_weights(folder: Path, config: dict[str, Any], seed: int) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in _shapes(config):
        values = rng.standard_normal(shape, dtype=np.float32)
        if "norm" in name:
            offset = 0.0 if config["model_type"] in _POST_NORMS else 1.0
            tensors[name] = values * np.float32(0.1) + np.float32(offset)
        elif "embed" in name or name.endswith(".bias"):
            tensors[name] = values * np.float32(0.5)
        else:
            tensors[name] = values * np.float32(1.5 / shape[-1] ** 0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    family, hidden, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    head_dim = config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (hidden,)
        if family in _POST_NORMS:
            for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                yield f"{prefix}{norm}.weight", (hidden,)
        if family in _FUSED:
            yield f"{prefix}self_attn.qkv_proj.weight", (query + 2 * kv, hidden)
            yield f"{prefix}mlp.gate_up_proj.weight", (2 * inner, hidden)
        else:
            for part, size in (("q", query), ("k", kv), ("v", kv)):
                yield f"{prefix}self_attn.{part}_proj.weight", (size, hidden)
                if family in _QKV_BIAS:
                    yield f"{prefix}self_attn.{part}_proj.bias", (size,)
            yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
            yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        if family in _QK_NORM:
            for part in ("q", "k"):
                yield f"{prefix}self_attn.{part}_norm.weight", (head_dim,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
