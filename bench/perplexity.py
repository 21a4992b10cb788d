"""The quality gate of the number formats: perplexity of the bench's corpus, against float32 on the same path.

    python -m bench.perplexity [--model smollm2-135m] [--out FILE]

The corpus is cut into pieces of 512 tokens; every token after a piece's first is scored by its log-probability, taken
from the engine as a client gets it (prompt_logprobs). Fails (exit code 1) where perplexity is over 1% above float32's.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import workload
from bench.machine import machine
from engine import LLM, EngineConfig, SamplingParams

PIECE_TOKENS = 512
MAX_LOSS = 0.01  # of float32's perplexity
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "int8"},
    "float32, KV int8": {"dtype": "float32", "kv_cache_dtype": "int8"},
    "int8, KV int8": {"dtype": "int8", "kv_cache_dtype": "int8"},
}


def pieces(llm: LLM) -> list[list[int]]:
    documents = workload.long_documents(llm.tokenizer)
    cut = [doc[start : start + PIECE_TOKENS] for doc in documents for start in range(0, len(doc), PIECE_TOKENS)]
    return [piece for piece in cut if len(piece) > 1]


def perplexity(llm: LLM, work: list[list[int]]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": piece} for piece in work], params)
    scores = [each.chosen.logprob for output in outputs for each in output.prompt_logprobs or [] if each is not None]
    return math.exp(-sum(scores) / len(scores))


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Ends the process where it does not know an argument."""
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main() -> int:
    options = options_of()
    found: dict[str, float] = {}
    num_tokens = 0
    for name, settings in FORMATS.items():
        llm = LLM(options.model, EngineConfig(enable_prefix_caching=False, **settings))
        work = pieces(llm)
        num_tokens = sum(map(len, work)) - len(work)
        found[name] = perplexity(llm, work)
        print(f"{name:<20} {found[name]:.4f}", flush=True)
    losses = {name: round(value / found["float32"] - 1, 5) for name, value in found.items()}
    is_good = max(losses.values()) <= MAX_LOSS
    report = {
        "model": options.model,
        "scored_tokens": num_tokens,
        "perplexity": {name: round(value, 4) for name, value in found.items()},
        "loss": losses,
        "allowed": MAX_LOSS,
        "passes": is_good,
        **machine(),
    }
    print(json.dumps(report))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
