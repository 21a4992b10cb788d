"""What drawing the tokens of one step costs.

    python -m bench.sampler [--vocab 49152] [--rows 32,64] [--cpu-time] [--out FILE]

Milliseconds per step for each kind of request, the fastest of several calls, over logits like a language model's: a
bell of spread 2.5 under a few clear favourites. `mixed` has all kinds in turn. Prints a table, ends with one JSON line,
and writes the same to --out. --cpu-time counts the processor's time on one thread instead of the clock's: the figure
to compare on a machine that others use as well.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.params import SamplingParams
from engine.sampler import Draw, sample
from engine.sequence import Request, Sequence

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, logprobs=5": {"temperature": 0.0, "logprobs": 5},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "T=1": {"temperature": 1.0},
    "T=0.7": {"temperature": 0.7},
    "T=1, penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "T=1, logprobs=5": {"logprobs": 5},
    "top_k=40": {"top_k": 40},
    "top_p=0.9": {"top_p": 0.9},
    "min_p=0.05": {"min_p": 0.05},
    "top_k, top_p, min_p": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
}
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 500, 100
MIN_CALLS, MIN_SECONDS = 5, 0.5


def logits_of(num_rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, vocab, generator=generator) * 2.5
    favourites = torch.randint(vocab, (num_rows, 12), generator=generator)
    return logits.scatter_add_(1, favourites, torch.linspace(18.0, 8.0, 12).expand(num_rows, -1))


def draws_of(kinds: list[dict[str, Any]], num_rows: int, vocab: int) -> list[Draw]:
    draws = []
    for row in range(num_rows):
        params = SamplingParams(**kinds[row % len(kinds)])
        tokens = torch.randint(vocab, (NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS,)).tolist()
        request = Request(str(row), tokens[:NUM_PROMPT_TOKENS], params, row)
        draws.append(Draw(row, Sequence(request, 0, row, tokens[NUM_PROMPT_TOKENS:])))
    return draws


def milliseconds(logits: torch.Tensor, draws: list[Draw], clock: Callable[[], float]) -> float:
    sample(logits, draws)
    fastest, began, calls = float("inf"), clock(), 0
    while calls < MIN_CALLS or clock() - began < MIN_SECONDS:
        start = clock()
        sample(logits, draws)
        fastest = min(fastest, clock() - start)
        calls += 1
    return fastest * 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sampler")
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=[32, 64])
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.cpu_time:
        torch.set_num_threads(1)
    kinds = {**{name: [kind] for name, kind in KINDS.items()}, "mixed": list(KINDS.values())}
    print(f"{'milliseconds per step':<24}" + "".join(f"{f'{rows} rows':>12}" for rows in options.rows))
    found: dict[str, dict[str, float]] = {}
    for name, kind in kinds.items():
        found[name] = {
            str(rows): round(
                milliseconds(logits_of(rows, options.vocab), draws_of(kind, rows, options.vocab), clock), 3
            )
            for rows in options.rows
        }
        print(f"{name:<24}" + "".join(f"{value:>12.2f}" for value in found[name].values()), flush=True)
    machine = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    how = "processor's time, one thread" if options.cpu_time else "clock"
    report = json.dumps({"vocab": options.vocab, "time": how, "milliseconds": found, **machine})
    print(report)
    if options.out is not None:
        options.out.write_text(report + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
