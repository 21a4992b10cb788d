"""Millstream's inference engine: paged KV, continuous batching, exact tokens. Knows no queue and no HTTP.

Importing this package loads no torch; the first use of `LLM` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.errors import InvalidRequest
    from engine.llm import LLM
    from engine.params import SamplingParams

__all__ = ["LLM", "EngineConfig", "InvalidRequest", "SamplingParams"]

_HOMES = {
    "LLM": "engine.llm",
    "EngineConfig": "engine.config",
    "InvalidRequest": "engine.errors",
    "SamplingParams": "engine.params",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
