"""Every family and every kind of rope against transformers: the same files, logits within 1e-4 in fp32.

The prompt is computed in chunks through a shuffled block table, so paging and windows are part of the comparison.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.families import decoder_config
from tests.engine.runner_aids import Driver, load, new_sequence
from tests.models import FAMILIES, make_tiny_model

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i * 0.1 for i in range(8)],
    "long_factor": [2.0 + i * 0.3 for i in range(8)],
}
# name -> (family, fields of config.json, prompt length)
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    **{family: (family, {}, 100) for family in FAMILIES},
    "linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 60),
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 60),
    "llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}}, 60),
    "yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 60),
    "yarn, trained on 128": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        60,
    ),
    "yarn, mscale": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2}},
        60,
    ),
    "longrope, long": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 256}, 300),
    "longrope, short": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 512}, 60),
    "old names": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, 60),
    "partial rotary": ("phi3", {"partial_rotary_factor": 0.5}, 60),
    "wide heads": ("llama", {"head_dim": 32}, 60),
    "one kv head": ("llama", {"num_key_value_heads": 1}, 60),
    "no grouping": ("llama", {"num_key_value_heads": 4}, 60),
    "tied": ("llama", {"tie_word_embeddings": True}, 60),
    "no window": ("mistral", {"sliding_window": None}, 60),
    "late windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, 60),
    "gemma3 stretched": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 60),
}


def chunks_of(length: int) -> list[int]:
    """A first chunk over a block border, two single tokens (which go the decodes' way), the rest."""
    return [33, 1, 1, length - 35]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path, cpu_kernels: str) -> None:
    from transformers import AutoModelForCausalLM

    family, overrides, length = CASES[name]
    folder = make_tiny_model(tmp_path, family, overrides=overrides)
    if overrides.get("sliding_window", ...) is None:
        write_field(folder, "sliding_window", None)  # null in the file, where leaving it out means the default
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompt = random.Random(name).choices(range(3, 320), k=length)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    found = our_logits(folder, prompt, cpu_kernels)
    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.5, "logits too flat to prove anything"


def our_logits(folder: Path, prompt: list[int], cpu_kernels: str) -> torch.Tensor:
    driver = Driver(load(folder, cpu_kernels=cpu_kernels))
    sequence = new_sequence(prompt)
    parts = []
    for num_tokens in chunks_of(len(prompt)):
        row = driver.row(sequence, num_tokens, num_logits=num_tokens)
        parts.append(driver.logits(row))
        sequence.num_computed_tokens = row.end
    return torch.cat(parts)


def write_field(folder: Path, name: str, value: Any) -> None:
    import json

    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, name: value}))


def test_a_batch_of_many_rows_equals_each_row_alone(tmp_path: Path, cpu_kernels: str) -> None:
    """One forward over decodes and chunks of several sequences, under two kinds of window."""
    folder = make_tiny_model(tmp_path, "gemma2")
    prompts = [random.Random(i).choices(range(3, 320), k=n) for i, n in enumerate((60, 1, 35, 80, 17))]
    driver = Driver(load(folder, cpu_kernels=cpu_kernels))
    sequences = [new_sequence(prompt) for prompt in prompts]
    driver.step(*(driver.row(sequence, 30) for sequence in (sequences[0], sequences[3])))
    rows = [driver.row(s, n) for s, n in zip(sequences, (30, 1, 35, 49, 1), strict=True)]
    together = driver.logits(*rows)
    assert [row.num_logits for row in rows] == [1, 1, 1, 0, 0]
    for place, prompt in enumerate(prompts[:3]):
        alone = Driver(load(folder, cpu_kernels=cpu_kernels))
        found = alone.logits(alone.row(new_sequence(prompt)))
        torch.testing.assert_close(found[0], together[place], atol=1e-5, rtol=1e-5)


def test_published_files_that_leave_fields_out() -> None:
    """A multimodal Gemma 3's text_config names a handful of fields; the family's defaults fill the rest."""
    config = decoder_config(
        {
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert [layer.window for layer in config.layers[:7]] == [1024] * 5 + [None, 1024]
    assert [config.ropes[layer.rope].kind for layer in config.layers[4:6]] == ["default", "linear"]
    assert config.ropes[1].theta == 10_000.0
    assert config.ropes[0].theta == 1_000_000.0
    assert config.is_tied
