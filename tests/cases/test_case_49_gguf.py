"""transformers #31766; llama.cpp PR #5824: Q and K rows of a GGUF put back in the wrong order, or put back twice.

Kind: the same weights in another file's order. Siblings: query and KV heads of different numbers, one KV head, biases
of permuted rows, heads of other sizes, families that are not permuted, tied and untied output, norms that other
writers shift; read by others' reader as well as by ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.weights.gguf import convert_gguf
from tests.cases.trial import Trial, prompt_of
from tests.engine.gguf_maker import write_gguf
from tests.engine.runner_aids import direct_logits, load
from tests.models import make_tiny_model

PROMPT = prompt_of(50)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, 9 and 3 heads": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}),
    "llama, head_dim of its own": ("llama", {"head_dim": 32}),
    "qwen2 tied": ("qwen2", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


def converted(model: Path, folder: Path) -> Path:
    target = folder / "converted"
    target.mkdir()
    convert_gguf(write_gguf(model, folder / "model.gguf"), target)
    return target


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_tokens_are_those_of_the_safetensors(name: str, tmp_path: Path) -> None:
    """Logits within 1e-4; in fact the same weights to the bit, so the same tokens."""
    family, overrides = SHAPES[name]
    model = make_tiny_model(tmp_path / "model", family, overrides=overrides)
    one, other = load(model), load(converted(model, tmp_path))
    assert (direct_logits(one, PROMPT) - direct_logits(other, PROMPT)).abs().max() < 1e-4
    outputs = [Trial(each).ask(PROMPT, max_tokens=8, temperature=0.0, logprobs=2) for each in (one, other)]
    assert outputs[0].choices[0].token_ids == outputs[1].choices[0].token_ids


@pytest.mark.parametrize("name", ["llama", "llama tied", "llama, 9 and 3 heads", "qwen2 tied", "qwen2"])
def test_the_files_mean_the_same_to_transformers(name: str, tmp_path: Path) -> None:
    """The permutation is not our own invention, undone by ourselves: another reader gets these logits from the file."""
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    auto: Any = transformers.AutoModelForCausalLM
    reader: Any = modeling_gguf_pytorch_utils

    family, overrides = SHAPES[name]
    model = make_tiny_model(tmp_path / "model", family, overrides=overrides)
    ours = converted(model, tmp_path)
    theirs: Any = auto.from_config(transformers.AutoConfig.from_pretrained(model)).eval()
    read = reader.load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=theirs)[
        "tensors"
    ]
    missing, unexpected = theirs.load_state_dict(read, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    assert (direct_logits(load(ours), PROMPT) - expected).abs().max() < 1e-4


def test_biases_of_permuted_rows_are_permuted_too(tmp_path: Path) -> None:
    """Llama's layout with attention biases, as some checkpoints have: the writers permute both."""
    from safetensors.numpy import load_file, save_file

    model = make_tiny_model(tmp_path / "model", overrides={"attention_bias": True})
    path = model / "model.safetensors"
    tensors = load_file(path)
    rng = np.random.default_rng(49)
    for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        bias = rng.standard_normal(tensors[name].shape[:1], dtype=np.float32)
        tensors[name.replace(".weight", ".bias")] = bias
    save_file(tensors, path, metadata={"format": "pt"})
    ours = converted(model, tmp_path)
    assert json.loads((ours / "config.json").read_text())["attention_bias"] is True
    one, other = load(model), load(ours)
    assert (direct_logits(one, PROMPT) - direct_logits(other, PROMPT)).abs().max() < 1e-4
    bare = load(make_tiny_model(tmp_path / "bare"))
    assert (direct_logits(bare, PROMPT) - direct_logits(one, PROMPT)).abs().max() > 0.01, "the biases count"
