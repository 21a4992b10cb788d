"""The same weights as GGUF and as safetensors give the same logits; quantized ones what their formula says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import ModelLoadError
from engine.models.families import decoder_config
from engine.models.rope import frequencies
from engine.text.tokenizer import Tokenizer
from engine.weights import cache
from engine.weights import gguf as our_gguf
from engine.weights.gguf import convert_gguf
from engine.weights.safetensors import Checkpoint
from tests.engine.gguf_maker import write_gguf
from tests.engine.runner_aids import direct_logits, load
from tests.models import make_tiny_model

PROMPT = list(range(10, 60))


def logits_of(folder: Path) -> torch.Tensor:
    return direct_logits(load(folder), PROMPT)


def converted(model: Path, folder: Path, **options: Any) -> Path:
    path = write_gguf(model, folder / "model.gguf", **options)
    target = folder / "converted"
    target.mkdir()
    convert_gguf(path, target)
    return target


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_fp32_gives_the_logits_of_the_safetensors(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", family, overrides=overrides)
    target = converted(model, tmp_path)
    assert (logits_of(target) - logits_of(model)).abs().max() < 1e-4
    assert Checkpoint(target).names == Checkpoint(model).names
    for name in Checkpoint(model).names:
        assert torch.equal(Checkpoint(target).read(name), Checkpoint(model).read(name)), name


def test_the_order_of_rows_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without putting Q and K rows back the logits differ: the test above can fail."""
    model = make_tiny_model(tmp_path / "model")
    monkeypatch.setattr(our_gguf, "halves_from_pairs", lambda rows, num_heads: rows)
    assert (logits_of(converted(model, tmp_path)) - logits_of(model)).abs().max() > 0.01


def test_stretched_frequencies_in_a_tensor_of_their_own(tmp_path: Path) -> None:
    """Llama 3.1's GGUFs hold no parameters, only the divisor of each frequency."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    overrides = {"rope_scaling": {**scaling, "original_max_position_embeddings": 64}}
    model = make_tiny_model(tmp_path / "model", overrides=overrides)
    config = decoder_config(json.loads((model / "config.json").read_text()))
    plain = 1.0 / config.ropes[0].theta ** (np.arange(0, 16, 2) / 16)
    divisors = (plain / frequencies(config.ropes[0], 512)[0].numpy()).astype(np.float32)
    target = converted(model, tmp_path, extra={"rope_freqs.weight": divisors})
    assert (logits_of(target) - logits_of(model)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("quantization", "tolerance"), [("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_0", 0.4), ("Q4_1", 0.3)]
)
def test_quantized_matrices_are_near_the_originals(tmp_path: Path, quantization: str, tolerance: float) -> None:
    model = make_tiny_model(tmp_path / "model")
    target = converted(model, tmp_path, quantization=quantization)
    for name in Checkpoint(model).names:
        original, found = Checkpoint(model).read(name), Checkpoint(target).read(name)
        assert found.dtype == torch.float32
        assert (found - original).abs().max() <= tolerance * original.abs().max(), name
    assert torch.isfinite(logits_of(target)).all()


def test_q4_1_is_its_formula(tmp_path: Path) -> None:
    """Blocks of 32 weights: fp16 scale d, fp16 least m, 16 bytes of low and then high nibbles: w = d * q + m."""
    import gguf

    model = make_tiny_model(tmp_path / "model", "qwen2")
    target = converted(model, tmp_path, quantization="Q4_1")
    name = "model.layers.0.mlp.down_proj.weight"
    raw = gguf.quants.quantize(Checkpoint(model).read(name).numpy(), gguf.GGMLQuantizationType.Q4_1)
    found = Checkpoint(target).read(name).numpy()
    for row in (0, 63):
        for block in range(128 // 32):
            data = raw[row, block * 20 : block * 20 + 20].tobytes()
            scale, least = np.frombuffer(data[:4], dtype=np.float16).astype(np.float32)
            nibbles = [byte & 15 for byte in data[4:]] + [byte >> 4 for byte in data[4:]]
            expected = np.array(nibbles, dtype=np.float32) * scale + least
            assert np.array_equal(found[row, block * 32 : block * 32 + 32], expected)


@pytest.mark.parametrize("quantization", ["Q4_K", "Q6_K"])
def test_k_quants_are_read(tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 256 with small random contents; the library cannot write them, so the bytes are made here."""
    import gguf

    quant_type = gguf.GGMLQuantizationType[quantization]
    block_bytes = gguf.GGML_QUANT_SIZES[quant_type][1]
    rng = np.random.default_rng(0)

    def made(values: np.ndarray[Any, Any], wanted: Any) -> np.ndarray[Any, Any]:
        assert wanted == quant_type
        blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // 256, block_bytes), dtype=np.uint8)
        scale = np.frombuffer(np.array([0.002], dtype=np.float16).tobytes(), dtype=np.uint8)
        blocks[..., slice(-2, None) if quantization == "Q6_K" else slice(0, 2)] = scale
        if quantization == "Q4_K":
            blocks[..., 2:4] = scale
        return blocks.reshape(*values.shape[:-1], -1)

    monkeypatch.setattr(gguf.quants, "quantize", made)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    target = converted(make_tiny_model(tmp_path / "model", overrides=sizes), tmp_path, quantization=quantization)
    weights = Checkpoint(target).read("model.layers.0.mlp.up_proj.weight")
    assert weights.shape == (256, 256)
    assert torch.isfinite(weights).all()
    assert weights.std() > 0.001
    assert torch.isfinite(logits_of(target)).all()


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_gguf, "SHARD_BYTES", 100_000)
    model = make_tiny_model(tmp_path / "model")
    target = converted(model, tmp_path)
    assert len(list(target.glob("model-*.safetensors"))) > 2
    assert torch.equal(logits_of(target), logits_of(model))


def test_the_tokenizer_and_its_template_come_along(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    ours, theirs = Tokenizer(converted(model, tmp_path)), Tokenizer(model)
    for text in ("the king and the sting", "漢字 😀 1234", "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template_source == theirs.chat_template_source
    assert (ours.eos_token_ids, ours.bos_token_id, ours.special_ids) == ({2}, 1, {0, 1, 2})


@pytest.mark.parametrize(
    ("pre", "add_bos", "begins"),
    [("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_text_begins_with_bos_where_the_file_says_so(
    tmp_path: Path, pre: str, add_bos: bool | None, begins: bool
) -> None:
    tokenizer = Tokenizer(converted(make_tiny_model(tmp_path / "model"), tmp_path, pre=pre, add_bos=add_bos))
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == ([1, *plain] if begins else plain)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 1234", ["a", " 1234"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "a 1234", ["a", " ", "123", "4"]),
        ("qwen2", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "it'S\n\n x", ["it", "'S", "\n\n", " x"]),
        ("gpt-2", "it'S\n\n x", ["it", "'", "S", "\n\n", " x"]),
    ],
)
def test_each_kind_cuts_words_by_its_own_rule(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer(converted(make_tiny_model(tmp_path / "model"), tmp_path, pre=pre))
    cut = [text[start:end] for _, (start, end) in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]
    assert cut == pieces


def test_an_unknown_way_of_cutting_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="deepseek-coder"):
        converted(make_tiny_model(tmp_path / "model"), tmp_path, pre="deepseek-coder")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", overrides={"model_type": "llama"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "falcon"}))
    with pytest.raises(ModelLoadError, match="falcon"):
        converted(model, tmp_path)


def test_a_tensor_nobody_knows_is_not_dropped(tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, dtype=np.float32)}
    with pytest.raises(ModelLoadError, match="attn_sinks"):
        converted(make_tiny_model(tmp_path / "model"), tmp_path, extra=extra)


@pytest.mark.parametrize("damage", ["cut", "magic", "empty"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = write_gguf(make_tiny_model(tmp_path / "model"), tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "magic": b"XXXX" + data[4:], "empty": b""}[damage])
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        convert_gguf(path, tmp_path)


def test_a_gguf_path_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.weights import resolve

    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    model = make_tiny_model(tmp_path / "model")
    path = write_gguf(model, tmp_path / "m.gguf")
    folder = resolve(str(path))
    assert cache.read_manifest(folder) is not None
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(path)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert torch.equal(logits_of(folder), logits_of(model))
    shutil.copy(write_gguf(make_tiny_model(tmp_path / "other", seed=9), tmp_path / "n.gguf"), path)
    assert resolve(str(path)) != folder
