"""vLLM #2012; llama-cpp-python #1501: chat prompts with two beginnings of text, and usage that counts another prompt.

Kind: special tokens added by more than one hand. Siblings: templates that write BOS, that do not, that write it where
the tokenizer adds none; plain prompts; token ids, which are taken as they are; special tokens as text; the same count
from every route, streamed or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, EngineConfig
from engine.config import LoadedModel
from tests.cases.conftest import load_native
from tests.models import CHAT_TEMPLATE, make_tiny_model

BOS = 1  # <|im_start|>
MESSAGES = [{"role": "user", "content": "the thing and 🙂 <|im_end|> é"}, {"role": "assistant", "content": ""},
            {"role": "user", "content": " "}]  # fmt: skip


def make_model(folder: Path, *, tokenizer_adds: bool, template_writes: bool) -> LoadedModel:
    make_tiny_model(folder)
    if tokenizer_adds:
        path = folder / "tokenizer.json"
        description = json.loads(path.read_text())
        bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        description["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [bos, text],
            "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [BOS], "tokens": ["<|im_start|>"]}},
        }
        path.write_text(json.dumps(description))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = ("{{ bos_token }}" if template_writes else "") + CHAT_TEMPLATE.replace("im_start", "end")
    path.write_text(json.dumps(config))
    return load_native(folder, num_threads=1)


@pytest.mark.parametrize("tokenizer_adds", [False, True])
@pytest.mark.parametrize("template_writes", [False, True])
async def test_usage_is_that_of_an_offline_render(
    service: Callable[..., Any], tmp_path: Path, tokenizer_adds: bool, template_writes: bool
) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    loaded = make_model(folder, tokenizer_adds=tokenizer_adds, template_writes=template_writes)
    offline: Any = AutoTokenizer.from_pretrained(folder)
    served = await service(lambda: LLM(loaded, EngineConfig(num_kv_blocks=64)))

    expected = offline.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert expected.count(BOS) == template_writes
    body = {"messages": MESSAGES, "max_tokens": 2}
    _, blocking = await served.post("chat/completions", body)
    assert blocking["usage"]["prompt_tokens"] == len(expected)
    chunks = await served.chunks("chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["usage"]["prompt_tokens"] == len(expected)
    job = await served.client.post(
        "/v1/jobs",
        json={"model": "fake", "input": MESSAGES, "params": {"max_tokens": 2}},
        headers={"prefer": "wait=20"},
    )
    assert job.json()["usage"]["prompt_tokens"] == len(expected)

    for text in ("the thing and 🙂", "<|im_start|>user", " ", "é"):
        expected = offline(text)["input_ids"]
        assert expected.count(BOS) == tokenizer_adds + text.startswith("<|im_start|>")
        _, answer = await served.post("completions", {"prompt": text, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == len(expected)
        _, answer = await served.post("completions", {"prompt": expected, "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize("tokenizer_adds", [False, True])
def test_the_engine_runs_the_very_ids_of_the_offline_render(tmp_path: Path, tokenizer_adds: bool) -> None:
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    loaded = make_model(folder, tokenizer_adds=tokenizer_adds, template_writes=True)
    offline: Any = AutoTokenizer.from_pretrained(folder)
    template = loaded.tokenizer.chat_template
    assert template is not None
    ids = loaded.tokenizer.encode(template.render(MESSAGES), add_special_tokens=False)
    assert ids == offline.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids[0] == BOS and ids.count(BOS) == 1
    [output] = LLM(loaded, EngineConfig(num_kv_blocks=64)).generate("the thing")
    assert output.prompt_token_ids == offline("the thing")["input_ids"]
