"""Where a decode step's time goes outside the model: planning, batch, draws, books, text.

    python -m bench.steps [--model smollm2-135m] [--dtype auto] [--batches 1,8,32,64] [--cpu-time] [--output FILE]

Decode steps of as many sequences at once, prompts of 64 tokens, greedy; microseconds per step, the median over steps.
`native` is the call that computes the model; `outside` is the rest of the step. --cpu-time counts the processor's time
of the engine's thread instead of the clock's: the figure to compare on a machine that others use as well.
Writes bench/results/steps-<date>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine.runner
from bench import workload
from bench.machine import machine
from engine import LLM, EngineConfig, SamplingParams

NUM_PROMPT_TOKENS, NUM_STEPS, NUM_WARM_STEPS = 64, 48, 4
RESULTS = Path(__file__).parent / "results"
PARTS = ("plan", "batch", "arguments", "native", "draw", "commit", "tell", "rest")


class Stopwatch:
    """Time spent in functions that it wraps, by name, since `take`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._spent: dict[str, float] = {}

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        inner = getattr(owner, attribute)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = self._clock()
            try:
                return inner(*arguments, **named)
            finally:
                self._spent[name] = self._spent.get(name, 0.0) + self._clock() - began

        setattr(owner, attribute, timed)

    def take(self) -> dict[str, float]:
        spent, self._spent = self._spent, {}
        return spent


def watch(llm: LLM, clock: Callable[[], float]) -> Stopwatch:
    """Wraps the parts of a step of this engine, which computes on the native path."""
    stopwatch = Stopwatch(clock)
    runner = llm._executor._runner
    stopwatch.wrap(llm._scheduler, "plan", "plan")
    stopwatch.wrap(llm._scheduler, "commit", "commit")
    stopwatch.wrap(llm, "_told", "tell")
    stopwatch.wrap(engine.runner, "build_batch", "batch")
    stopwatch.wrap(engine.runner, "answer", "draw")
    stopwatch.wrap(runner.decoder, "forward", "forward")
    stopwatch.wrap(runner.decoder._library, "forward", "native")
    return stopwatch


def step_of(llm: LLM, stopwatch: Stopwatch, clock: Callable[[], float]) -> dict[str, float]:
    """Microseconds of one step, by part."""
    stopwatch.take()
    began = clock()
    llm.step()
    total = clock() - began
    spent = stopwatch.take()
    spent["arguments"] = spent.pop("forward") - spent["native"]
    spent["rest"] = total - sum(spent.values())
    return {part: spent[part] * 1e6 for part in PARTS}


def measure(llm: LLM, stopwatch: Stopwatch, batch: int, clock: Callable[[], float]) -> dict[str, float]:
    documents = workload.long_documents(llm.tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_WARM_STEPS + NUM_STEPS + 16, ignore_eos=True)
    for number in range(batch):
        document = documents[number % len(documents)]
        llm.add_request(f"{number}", document[number : number + NUM_PROMPT_TOKENS], params)
    while llm.stats().num_waiting or llm.stats().num_running < batch:
        llm.step()
    for _ in range(NUM_WARM_STEPS):
        llm.step()
    steps = [step_of(llm, stopwatch, clock) for _ in range(NUM_STEPS)]
    for number in range(batch):
        llm.abort(f"{number}")
    return {part: round(statistics.median(step[part] for step in steps), 1) for part in PARTS}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64])
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--output", type=Path, help="file; bench/results/steps-<date>.json")
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter
    llm = LLM(options.model, EngineConfig(dtype=options.dtype, max_num_batched_tokens=1024, speculative="none"))
    stopwatch = watch(llm, clock)
    print(f"{'microseconds per step':<24}" + "".join(f"{part:>11}" for part in PARTS) + f"{'outside':>11}")
    found = {}
    for batch in options.batches:
        parts = measure(llm, stopwatch, batch, clock)
        outside = 1 - parts["native"] / sum(parts.values())
        found[str(batch)] = {**parts, "outside": round(outside, 4)}
        cells = "".join(f"{parts[part]:>11.0f}" for part in PARTS)
        print(f"{f'{batch} sequences':<24}{cells}{outside:>11.1%}", flush=True)
    report = {
        "what": "microseconds of a decode step by part; outside: the share beyond the native call",
        "machine": machine(),
        "model": options.model,
        "dtype": llm.info.dtype,
        "time": "the engine thread's processor time" if options.cpu_time else "clock",
        "steps": found,
    }
    output = options.output or RESULTS / f"steps-{report['machine']['date']}.json"
    output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
