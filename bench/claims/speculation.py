"""The claim about speculation, by the real scheduler on a clock that only the given costs move."""

from __future__ import annotations

from typing import Any

from engine import LLM, EngineConfig, SamplingParams
from engine.fake_runner import load_fake

NUM_TOKENS = 3000
BAR = (2.35, 2.55)


def simulated() -> dict[str, Any]:
    """Draft 2 ms, target 50 ms, acceptance 0.7: K = 5, and K as the engine adapts it up to 5."""
    plain = _seconds()
    fixed, adapted = (
        _seconds(speculative="draft", speculative_model="fake", speculative_adaptive=adapts) for adapts in (False, True)
    )
    return {"speedup": round(plain / fixed, 3), "speedup_adaptive": round(plain / adapted, 3), "bar": BAR}


def _seconds(**changes: Any) -> float:
    passed = [0.0]
    config = EngineConfig(
        fake_seconds_per_step=0.05,
        fake_seconds_per_draft=0.002,
        fake_acceptance=0.7,
        num_speculative_tokens=5,
        **changes,
    )

    def sleep(seconds: float) -> None:
        passed[0] += seconds

    llm = LLM(load_fake(config, sleep=sleep), config, clock=lambda: passed[0])
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=NUM_TOKENS, seed=1))
    return passed[0]
