"""What all runners share: reading workloads, timing them, telling the result. Needs nothing but Python: each peer's
environment runs it.

A runner is called `RUNNER MODEL [OPTIONS] --workloads NAME=FILE ... [--outputs FOLDER]`. It loads, warms up, runs each
workload (`[{"prompt_ids": [...], "max_tokens": n}]`, greedy, end of sequence ignored, all submitted at once) and prints
one JSON line for each.
"""

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

SINGLE_TOKENS, SINGLE_RUNS = 64, 3


class Item(TypedDict):
    prompt_ids: list[int]
    max_tokens: int


Run = Callable[[list[Item]], list[list[int]]]
"""Completes the items together; returns each one's output token ids."""


def parser(description: str | None) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("model")
    options.add_argument("--workloads", nargs="+", required=True, metavar="NAME=FILE")
    options.add_argument("--outputs", type=Path, help="folder for each workload's token ids, as NAME.json")
    return options


def workloads_of(options: argparse.Namespace) -> dict[str, list[Item]]:
    named = (workload.split("=", 1) for workload in options.workloads)
    return {name: json.loads(Path(file).read_text()) for name, file in named}


def measure(peer: str, ready_seconds: float, workloads: dict[str, list[Item]], run: Run, outputs: Path | None) -> None:
    """Times `run` over each workload. `single_s`: its first prompt alone, 64 tokens, the median of three."""
    first = next(iter(workloads.values()))
    run([{"prompt_ids": item["prompt_ids"], "max_tokens": 4} for item in first])  # first touch of memory, of KV as well
    for name, items in workloads.items():
        made, seconds = _timed(run, items)
        alone: list[Item] = [{"prompt_ids": items[0]["prompt_ids"], "max_tokens": SINGLE_TOKENS}]
        single = [_timed(run, alone)[1] for _ in range(SINGLE_RUNS)]
        num_output = sum(map(len, made))
        total = num_output + sum(len(item["prompt_ids"]) for item in items)
        line: dict[str, Any] = {
            "peer": peer,
            "workload": name,
            "seconds": round(seconds, 3),
            "output_tokens": num_output,
            "total_tokens_per_s": round(total / seconds, 1),
            "ready_s": round(ready_seconds, 2),
            "single_s": round(statistics.median(single), 3),
            "tokens_sha256": hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16],
        }
        print(json.dumps(line), flush=True)
        if outputs is not None:
            outputs.mkdir(parents=True, exist_ok=True)
            (outputs / f"{name}.json").write_text(json.dumps(made))


def _timed(run: Run, items: list[Item]) -> tuple[list[list[int]], float]:
    start = time.perf_counter()
    made = run(items)
    return made, time.perf_counter() - start
