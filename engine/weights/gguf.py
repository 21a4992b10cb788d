"""Reads a GGUF file once and writes it as an ordinary model folder, in fp32.

The `gguf` library parses and dequantizes; what is ours is the way back to Hugging Face's names and row order.
GGUF's writers permute the Q and K rows of the `llama` architecture (rotary pairs interleaved instead of in halves);
they are put back here. Other architectures are stored unpermuted. A missing `output.weight` means a tied head.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelLoadError
from engine.weights.cache import LAYOUT_VERSION, Manifest, write_manifest
from engine.weights.digest import digest_of_files, sha256_of_file
from engine.weights.gguf_tokenizer import adds_bos, tokenizer_json

FloatArray = npt.NDArray[np.float32]
SHARD_BYTES = 4 << 30

# GGUF's file names of a tensor -> ours, without ".weight" or ".bias".
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's stretched frequencies, one factor per pair
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class GGUFFile:
    """An open GGUF: its fields as Python values, its tensors by name."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelLoadError(f"{self.path} lacks the field {key}")
        return value

    def read(self, name: str) -> FloatArray:
        """The tensor in fp32, in the row-major shape that its layer multiplies with."""
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelLoadError(f"{self.path}: {name} is {tensor.tensor_type.name}, which cannot be read") from error
        shape = tuple(int(size) for size in reversed(tensor.shape))
        return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)


def convert_gguf(path: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and the manifest into `folder`."""
    source = GGUFFile(path)
    config = model_config(source)
    _write_json(folder / "config.json", config)
    (folder / "tokenizer.json").write_text(tokenizer_json(source))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    write_shards(folder, tensors_in_our_order(source, config))
    write_manifest(
        folder,
        Manifest(
            layout_version=LAYOUT_VERSION,
            source_sha256=sha256_of_file(path),
            weights_digest=digest_of_files([folder / "config.json", *folder.glob("*.safetensors")]),
            tokenizer_digest=digest_of_files([folder / "tokenizer.json"]),
        ),
    )


def model_config(source: GGUFFile) -> dict[str, Any]:
    """The fields of config.json that the decoder reads."""
    kind = source.require("general.architecture")
    if kind not in _CLASSES:
        raise ModelLoadError(
            f"{source.path}: GGUF architecture {kind!r} is not supported; known: {', '.join(_CLASSES)}"
        )
    hidden_size = source.require(f"{kind}.embedding_length")
    num_heads = source.require(f"{kind}.attention.head_count")
    head_dim = source.get(f"{kind}.attention.key_length", hidden_size // num_heads)
    config = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": len(source.require("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": source.require(f"{kind}.feed_forward_length"),
        "num_hidden_layers": source.require(f"{kind}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": source.get(f"{kind}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.require(f"{kind}.context_length"),
        "rms_norm_eps": _shortest(source.require(f"{kind}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(source.get(f"{kind}.rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(source, kind),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "float32",
        "bos_token_id": source.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
    }
    return {name: value for name, value in config.items() if value is not None}


def rope_scaling(source: GGUFFile, kind: str) -> dict[str, Any] | None:
    """GGUF keeps Llama 3.1's stretch as one divisor per frequency: `longrope` with the same factors at every length."""
    if _ROPE_FACTORS in source.tensors:
        factors = [float(factor) for factor in source.read(_ROPE_FACTORS)]
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": source.require(f"{kind}.context_length"),
        }
    scaling = source.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return None
    if scaling not in ("linear", "yarn"):
        raise ModelLoadError(f"{source.path}: rope scaling {scaling!r} is not supported; known: linear, yarn")
    found = {
        "rope_type": scaling,
        "factor": source.require(f"{kind}.rope.scaling.factor"),
        "original_max_position_embeddings": source.get(f"{kind}.rope.scaling.original_context_length"),
    }
    return {name: value for name, value in found.items() if value is not None}


def tokenizer_config(source: GGUFFile) -> dict[str, Any]:
    """Special tokens and the chat template, in the fields that tokenizer_config.json has."""
    tokens: list[str] = source.require("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "add_bos_token": adds_bos(source),
        "chat_template": source.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = source.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    return {name: value for name, value in config.items() if value is not None}


def tensors_in_our_order(source: GGUFFile, config: dict[str, Any]) -> Iterator[tuple[str, Callable[[], FloatArray]]]:
    """(our name, how to read it) for every tensor. Fails on a name it does not know: nothing is dropped in silence."""
    for name in source.tensors:
        if name == _ROPE_FACTORS:
            continue
        num_heads = None
        if config["model_type"] == "llama" and ".attn_q." in name:
            num_heads = config["num_attention_heads"]
        if config["model_type"] == "llama" and ".attn_k." in name:
            num_heads = config["num_key_value_heads"]
        yield our_name(source.path, name), lambda name=name, heads=num_heads: _read(source, name, heads)  # type: ignore[misc]


def our_name(path: Path, name: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{kind}"
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.{kind}"
    raise ModelLoadError(f"{path}: unknown tensor {name}")


def halves_from_pairs(rows: FloatArray, num_heads: int) -> FloatArray:
    """Undoes GGUF's Q/K order: row 2i + h of a head goes back to row h * head_dim / 2 + i."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def write_shards(folder: Path, tensors: Iterator[tuple[str, Callable[[], FloatArray]]]) -> None:
    """One model.safetensors, or numbered shards of about 4 GiB and an index; one shard in memory at a time."""
    from safetensors.numpy import save_file

    homes: dict[str, str] = {}
    shard: dict[str, FloatArray] = {}
    num_shards = 0

    def flush() -> None:
        nonlocal num_shards
        num_shards += 1
        file = f"model-{num_shards:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        homes.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, read in tensors:
        values = read()
        if shard and sum(array.nbytes for array in shard.values()) + values.nbytes > SHARD_BYTES:
            flush()
        shard[name] = values
    flush()
    if num_shards == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": homes})


def _read(source: GGUFFile, name: str, permuted_heads: int | None) -> FloatArray:
    values = source.read(name)
    return values if permuted_heads is None else halves_from_pairs(values, permuted_heads)


def _shortest(value: float) -> float:
    """GGUF stores fp32; 9.999999747e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
