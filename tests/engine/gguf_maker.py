"""Writes a model folder as a GGUF file, the way llama.cpp's converter does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def pairs_from_halves(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """llama.cpp's order of Q and K rows: the two halves of each head interleaved."""
    output = np.empty_like(rows)
    head_dim = rows.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for half in range(2):
                output[head * head_dim + 2 * i + half] = rows[head * head_dim + half * head_dim // 2 + i]
    return output


def write_gguf(
    model: Path,
    path: Path,
    *,
    quantization: str = "F32",
    pre: str = "gpt-2",
    add_bos: bool | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """`quantization` applies to matrices; norms and biases stay fp32, as everywhere. `extra`: further tensors."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    _add_tokenizer(writer, model, pre)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    quant_type = gguf.GGMLQuantizationType[quantization]
    for name, values in {**load_file(model / "model.safetensors"), **(extra or {})}.items():
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            values = pairs_from_halves(values, heads)
        written = name if name in (extra or {}) else gguf_name(name)
        if values.ndim == 2:
            writer.add_tensor(written, gguf.quants.quantize(values, quant_type), raw_dtype=quant_type)
        else:
            writer.add_tensor(written, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, model: Path, pre: str) -> None:
    description = json.loads((model / "tokenizer.json").read_text())
    config = json.loads((model / "tokenizer_config.json").read_text())
    vocab = sorted(description["model"]["vocab"].items(), key=lambda item: item[1])
    specials = {token["content"] for token in description["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token in specials else 1 for token, _ in vocab])
    writer.add_token_merges([" ".join(pair) for pair in description["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(config["chat_template"])
