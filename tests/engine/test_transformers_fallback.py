"""Models without a native decoder: transformers' own logits through our KV pool, or a refusal that says why."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel
from engine.errors import InvalidConfig, ModelLoadError
from tests.engine.runner_aids import Driver, load, new_sequence
from tests.models import VOCAB_SIZE, write_tiny_tokenizer

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt_neox": {**_COMMON, "use_parallel_residual": True},
    "opt": {**_COMMON, "ffn_dim": 128, "word_embed_proj_dim": 32},
    "gptj": {**_GPT, "rotary_dim": 8},
    "phi": {**_COMMON, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "gpt2": _GPT,
    "starcoder2": {**_COMMON, "num_key_value_heads": 2, "sliding_window": 24},
    "mixtral": {**_COMMON, "num_key_value_heads": 2, "num_local_experts": 4},
    "cohere2": {
        **_COMMON,
        "num_key_value_heads": 2,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "logit_scale": 1.0,
    },
}


def make(folder: Path, model_type: str, **fields: Any) -> Path:
    """A folder as published: random weights whose logits are far from flat."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.5 if "emb" in name or "wte" in name else 1.2 / parameter.shape[-1] ** 0.5)
            elif "bias" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(model_type: str) -> Path:
        if model_type not in made:
            made[model_type] = make(tmp_path_factory.mktemp(model_type), model_type, **ARCHITECTURES[model_type])
        return made[model_type]

    return of


def expected_logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocab], by the model itself in one piece."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
    return logits


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 320), k=length)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_logits_of_chunks_and_decodes_equal_the_models_own(folder_of: Callable[[str], Path], model_type: str) -> None:
    prompt = prompt_of(100)
    expected = expected_logits(folder_of(model_type), prompt)
    driver = Driver(load(folder_of(model_type)))
    sequence = new_sequence(prompt)
    found = []
    for num_tokens in (33, 1, 1, 40, 1, 24):
        row = driver.row(sequence, num_tokens, num_logits=num_tokens)
        found.append(driver.logits(row))
        sequence.num_computed_tokens = row.end
    assert (torch.cat(found) - expected).abs().max() < 1e-4
    assert expected.std() > 0.3, "logits too flat to prove anything"


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_rows_of_a_batch_do_not_see_each_other(folder_of: Callable[[str], Path], model_type: str) -> None:
    """Decodes and chunks of five sequences in one forward, each against the model alone."""
    prompts = [prompt_of(length) for length in (60, 1, 35, 80, 17)]
    driver = Driver(load(folder_of(model_type)))
    sequences = [new_sequence(prompt) for prompt in prompts]
    driver.step(*(driver.row(sequence, 59) for sequence in (sequences[0], sequences[3])))
    logits = driver.logits(*(driver.row(sequence) for sequence in sequences))
    assert len(logits) == len(prompts)
    for found, prompt in zip(logits, prompts, strict=True):
        assert (found - expected_logits(folder_of(model_type), prompt)[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("model_type", ["gpt_neox", "opt", "gptj", "phi"])
def test_an_engine_generates_the_models_greedy_tokens(folder_of: Callable[[str], Path], model_type: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = folder_of(model_type)
    llm = LLM(str(folder), EngineConfig(num_kv_blocks=40, block_size=8, max_num_batched_tokens=32, max_num_seqs=8))
    prompts = [prompt_of(length) for length in (5, 40, 23)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, output in zip(prompts, outputs, strict=True):
        made = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                made.append(int(model(torch.tensor([made]), use_cache=False).logits[0, -1].argmax()))
        assert output.choices[0].token_ids == made[len(prompt) :]


def test_what_such_a_model_says_about_itself(folder_of: Callable[[str], Path]) -> None:
    model: LoadedModel = load(folder_of("gptj"))
    assert model.info.kernels.startswith("transformers-")
    assert (model.info.max_model_len, model.info.vocab_size) == (256, VOCAB_SIZE)
    with pytest.raises(InvalidConfig, match="context is 256"):
        load(folder_of("gptj"), max_model_len=300)
    with pytest.raises(InvalidConfig, match="cpu_kernels"):
        load(folder_of("gptj"), cpu_kernels="native")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "positions in the scores": (
        "bloom",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "does not use the attention interface",
    ),
    "a state instead of a cache": (
        "mamba",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2},
        "does not use the attention interface",
    ),
    "sinks": ("gpt_oss", {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}, "sinks"),
    "convolutions between tokens": (
        "lfm2",
        {**_COMMON, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        "layer types conv",
    ),
    "tokens that see later ones": ("bert", _COMMON, "off by"),
    "frequencies by the longest row": (
        "phi",
        {**_COMMON, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope type dynamic",
    ),
    "values of another size than keys": (
        "deepseek_v3",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
        "its values 16",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_paged_attention_would_change_is_refused_by_name(tmp_path: Path, name: str) -> None:
    model_type, fields, reason = REFUSED[name]
    with pytest.raises(ModelLoadError, match=reason) as caught:
        load(make(tmp_path, model_type, **fields))
    assert model_type in str(caught.value)


def test_tensors_that_lack_are_not_made_up(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make(tmp_path, "gpt_neox", **ARCHITECTURES["gpt_neox"])
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if "dense_h_to_4h.weight" in name)
    del tensors[gone]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="lacks 1 of its tensors"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "quux"}, "no model that transformers knows"),
        ({"model_type": "t5"}, "an encoder with a decoder"),
        ({"model_type": "vit"}, "no causal language model"),
    ],
)
def test_other_kinds_of_model_are_refused(
    folder_of: Callable[[str], Path], tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder_of("gptj") / file).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelLoadError, match=reason):
        load(tmp_path)


def test_code_in_the_models_folder_is_not_run(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((folder_of("gptj") / file).read_bytes())
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with pytest.raises(ModelLoadError):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()
