"""What a worker must not import on its way to the first token, and how the stages of its start are told apart."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.coldstart import FIRST_TOKEN, STAGES, durations

UNWANTED = {
    *("transformers", "huggingface_hub", "gguf", "triton", "sympy", "scipy", "sklearn"),
    *("boto3", "botocore", "celery", "litestar", "uvicorn", "httpx", "requests", "openai", "llguidance"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.run"),
}

SERVE_ONE_TOKEN = """
import sys
import worker.main
from engine import LLM, SamplingParams
[output] = LLM("smollm2-135m").generate("The mill stands", SamplingParams(max_tokens=1))
assert len(output.choices[0].token_ids) == 1
print(*sys.modules)
"""


@pytest.mark.real_model
def test_a_worker_serves_its_first_token_without_the_slow_imports() -> None:
    command = [sys.executable, "-c", SERVE_ONE_TOKEN]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=120)
    assert not UNWANTED & set(done.stdout.split())


def test_stages_are_the_time_between_what_the_worker_says() -> None:
    moments = {stage: 0.5 * (number + 1) for number, stage in enumerate([*STAGES.values(), FIRST_TOKEN])}
    assert set(durations(moments).values()) == {0.5}
    assert sum(durations(moments).values()) == pytest.approx(moments[FIRST_TOKEN])
    del moments[FIRST_TOKEN]
    with pytest.raises(RuntimeError, match="first forward"):
        durations(moments)
