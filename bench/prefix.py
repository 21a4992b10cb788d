"""What the prefix cache saves where many documents come behind one instruction.

    python -m bench.prefix [--model smollm2-135m] [--dtype auto] [--documents 64] [--runs 3] [--output FILE]

One instruction of 700 tokens, then a piece of the corpus of 80 to 240 tokens, 32 tokens to write, greedy, all submitted
at once: with and without the cache in turn, in one process, from an empty cache each time. Both must say the same
tokens. Writes bench/results/prefix-<date>.json; exit code 1 where tokens differ or the gain is under 1.7.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench import workload
from bench.machine import machine
from engine import LLM, EngineConfig, SamplingParams

BAR = 1.7
NUM_INSTRUCTION_TOKENS, NUM_OUTPUT_TOKENS = 700, 32
DOCUMENT_TOKENS = (80, 240)
RESULTS = Path(__file__).parent / "results"


def prompts_of(llm: LLM, num_documents: int) -> list[list[int]]:
    """Every prompt begins with the same 700 tokens and goes on with its own document."""
    rng = random.Random(7)
    lengths = [(NUM_INSTRUCTION_TOKENS, 0), *((rng.randint(*DOCUMENT_TOKENS), 0) for _ in range(num_documents))]
    instruction, *documents = (item["prompt_ids"] for item in workload.pieces(llm.tokenizer, rng, lengths))
    return [instruction + document for document in documents]


def one_run(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]], int]:
    """Seconds, each output's tokens, and how many prompt tokens came from the cache, which is empty before."""
    llm.drop_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    seconds = time.perf_counter() - began
    return (
        seconds,
        [output.choices[0].token_ids for output in outputs],
        sum(output.num_cached_tokens for output in outputs),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, help="file; bench/results/prefix-<date>.json")
    options = parser.parse_args()
    engines = {
        name: LLM(options.model, EngineConfig(dtype=options.dtype, enable_prefix_caching=name == "cached"))
        for name in ("without", "cached")
    }
    prompts = prompts_of(engines["cached"], options.documents)
    for llm in engines.values():
        one_run(llm, prompts[:2])  # first touch of memory
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    told: dict[str, tuple[list[list[int]], int]] = {}
    for _ in range(options.runs):
        for name, llm in engines.items():
            took, outputs, num_cached = one_run(llm, prompts)
            seconds[name].append(took)
            told[name] = outputs, num_cached
            print(
                f"{name:<8} {took:7.2f} s   {num_cached:,} of {sum(map(len, prompts)):,} prompt tokens cached",
                flush=True,
            )
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    is_equal = told["without"][0] == told["cached"][0]
    gain = medians["without"] / medians["cached"]
    report: dict[str, Any] = {
        "what": f"{options.documents} documents behind one instruction of {NUM_INSTRUCTION_TOKENS} tokens",
        "machine": machine(),
        "model": options.model,
        "dtype": engines["cached"].info.dtype,
        "seconds": {name: [round(each, 3) for each in taken] for name, taken in seconds.items()},
        "gain": round(gain, 2),
        "bar": BAR,
        "num_prompt_tokens": sum(map(len, prompts)),
        "num_cached_tokens": told["cached"][1],
        "same_tokens": is_equal,
    }
    output = options.output or RESULTS / f"prefix-{report['machine']['date']}.json"
    output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"gain {gain:.2f}x (bar {BAR}x), {'the same tokens' if is_equal else 'TOKENS DIFFER'}")
    return 0 if is_equal and gain >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
