"""What a model answers when nobody disturbs it: the same engine, alone in this process."""

from __future__ import annotations

import json
from typing import Any

from engine import LLM, SamplingParams
from engine.config import EngineConfig


class Reference:
    """Answers are kept, so that thousands of jobs may share a few prompts."""

    def __init__(self, model: str = "fake", **engine: Any) -> None:
        self._llm: LLM | None = None
        self._model = model
        self._config = EngineConfig(**{"num_kv_blocks": 512, **engine})
        self._known: dict[str, list[list[int]]] = {}

    def tokens(self, prompt: str, params: dict[str, Any]) -> list[list[int]]:
        """By choice."""
        key = json.dumps([prompt, params], sort_keys=True)
        if key not in self._known:
            self._llm = self._llm or LLM(self._model, self._config)
            [output] = self._llm.generate([prompt], SamplingParams(**params))
            self._known[key] = [list(choice.token_ids) for choice in output.choices]
        return self._known[key]
