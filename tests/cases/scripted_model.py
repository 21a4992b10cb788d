"""The deterministic stand-in for a model, writing what a test wants it to write."""

from __future__ import annotations

from typing import Any

from engine import LLM, EngineConfig
from engine.config import LoadedModel
from engine.fake_runner import FakeRunner, load_fake
from engine.sequence import Sequence


class ScriptedRunner(FakeRunner):
    """Every sequence writes `script` over and over, a byte a token."""

    script = b""

    def _token(self, sequence: Sequence, digest: int) -> int:
        return self.script[sequence.num_output_tokens % len(self.script)]


def writing(text: str | bytes, **settings: Any) -> LLM:
    """An engine over a byte-level vocabulary whose every answer is `text`, repeated."""
    config = EngineConfig(**{"num_kv_blocks": 256, **settings})
    loaded = load_fake(config)
    runner = ScriptedRunner(config, verify_kv=True)
    runner.script = text.encode() if isinstance(text, str) else text
    return LLM(LoadedModel(runner=runner, tokenizer=loaded.tokenizer, info=loaded.info), config)
