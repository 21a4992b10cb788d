"""The quality gate of a number format: perplexity of the bench's corpus, against float32 on the same path.

    python -m bench.perplexity [--model smollm2-135m] [--dtype int8] [--out FILE]

The corpus is cut into pieces of 512 tokens; every token after a piece's first is scored by its log-probability, taken
from the engine as a client gets it (prompt_logprobs). Fails (exit code 1) where perplexity is over 1% above float32's.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from bench import workload
from bench.machine import machine
from engine import LLM, EngineConfig, SamplingParams

PIECE_TOKENS = 512
MAX_LOSS = 0.01  # of float32's perplexity


def pieces(llm: LLM) -> list[list[int]]:
    documents = workload.long_documents(llm.tokenizer)
    cut = [doc[start : start + PIECE_TOKENS] for doc in documents for start in range(0, len(doc), PIECE_TOKENS)]
    return [piece for piece in cut if len(piece) > 1]


def perplexity(llm: LLM, work: list[list[int]]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": piece} for piece in work], params)
    scores = [each.chosen.logprob for output in outputs for each in output.prompt_logprobs or [] if each is not None]
    return math.exp(-sum(scores) / len(scores))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.perplexity", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, float] = {}
    num_tokens = 0
    for dtype in ("float32", options.dtype):
        llm = LLM(options.model, EngineConfig(dtype=dtype, enable_prefix_caching=False))
        work = pieces(llm)
        num_tokens = sum(map(len, work)) - len(work)
        found[dtype] = perplexity(llm, work)
        print(f"{dtype:<10} {found[dtype]:.4f}", flush=True)
    loss = found[options.dtype] / found["float32"] - 1
    is_good = loss <= MAX_LOSS
    report = {
        "model": options.model,
        "scored_tokens": num_tokens,
        "perplexity": {name: round(value, 4) for name, value in found.items()},
        "loss": round(loss, 5),
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
