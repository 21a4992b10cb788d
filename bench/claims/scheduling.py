"""Claims about scheduling: continuous against static batching on a mixed load, and what a decision costs."""

from __future__ import annotations

import random
import time
from statistics import fmean
from typing import Any

from bench.claims.simulated import Ask, Run, percentile, serve, simulated
from engine import LLM, EngineConfig, SamplingParams

SHARE_SHORT = 0.8


def mixed_asks(count: int, *, short: int, long: int, rate: float | None, seed: int = 4) -> list[Ask]:
    """80% write `short` tokens, the rest `long`; they come at `rate` a second (Poisson), or all at once."""
    rng = random.Random(seed)
    now, asks = 0.0, []
    for index in range(count):
        tokens = short if rng.random() < SHARE_SHORT else long
        asks.append(Ask(index, 100, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True), now))
        now += rng.expovariate(rate) if rate else 0.0
    return asks


def compare(continuous: Run, static: Run, asks: list[Ask], short: int) -> dict[str, float]:
    names = [ask.index for ask in asks if ask.params.max_tokens == short]

    def p99(run: Run) -> float:
        return percentile([run.latencies[name] for name in names], 0.99)

    return {
        "p99_short_continuous": p99(continuous),
        "p99_short_static": p99(static),
        "p99_ratio": p99(static) / p99(continuous),
        "throughput_ratio": continuous.tokens_per_second / static.tokens_per_second,
    }


def mixed_simulated() -> dict[str, Any]:
    """50 and 2,000 output tokens, costs of a GPU, 32 sequences at once."""
    config = EngineConfig(
        num_kv_blocks=8192,
        max_num_seqs=32,
        enable_prefix_caching=False,
        fake_seconds_per_step=0.025,
        fake_seconds_per_token=0.00005,
    )
    found: dict[str, Any] = {"bar_p99_ratio": 5.0, "bar_throughput_ratio": 3.0}
    for name, rate in (("steady", 1.9), ("at_once", None)):
        asks = mixed_asks(240, short=50, long=2000, rate=rate)
        runs = []
        for batch in (None, config.max_num_seqs):
            llm, clock = simulated(config)
            runs.append(serve(llm, clock, asks, idle=clock.advance, static_batch=batch))
        found[name] = compare(runs[0], runs[1], asks, 50)
    return found


def mixed_on_this_cpu(model: str) -> dict[str, Any]:
    """The same with the real model here, shorter: 16 and 240 output tokens, 8 sequences at once, all sent at once."""
    asks = mixed_asks(40, short=16, long=240, rate=None)
    runs = []
    for batch in (None, 8):
        llm = LLM(model, EngineConfig(max_num_seqs=8, num_kv_blocks=1024, enable_prefix_caching=False))
        llm.generate(["warm"], SamplingParams(max_tokens=4))
        runs.append(serve(llm, time.monotonic, asks, idle=time.sleep, static_batch=batch))
    return compare(runs[0], runs[1], asks, 16)


def decision_cost() -> dict[str, Any]:
    """Microseconds that a step spends on scheduling and blocks alone (mean of 120), by batch and by queue."""
    rows = []
    for num_seqs, num_waiting in ((64, 10), (64, 100_000), (256, 10), (1024, 10)):
        rows.append({"num_seqs": num_seqs, "num_waiting": num_waiting, "us": _us_per_step(num_seqs, num_waiting)})
    return {"rows": rows, "bar_us": {"64": 100, "1024": 1000}}


def _us_per_step(num_seqs: int, num_waiting: int) -> float:
    from engine.costs import StepCosts
    from engine.plan import Sampled, StepResult
    from engine.scheduler import Scheduler
    from engine.sequence import Request, Sequence

    config = EngineConfig(
        num_kv_blocks=num_seqs * 16, max_num_seqs=num_seqs, max_num_batched_tokens=max(2048, num_seqs)
    )
    scheduler = Scheduler(
        config, num_blocks=num_seqs * 16, num_host_slots=0, max_model_len=4096, costs=StepCosts()
    )  # the pool holds what runs, so nothing is preempted
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    for index in range(num_seqs + num_waiting):
        request = Request(str(index), [1 + index % 50] * 16, params, seed=0, arrival=float(index))
        request.sequences = [Sequence(request, 0, 0)]
        scheduler.add(request)
    times = []
    for step in range(140):
        began = time.perf_counter()
        plan = scheduler.plan(float(step))
        planned = time.perf_counter()
        result = StepResult([Sampled(7) for row in plan.rows for _ in row.draws])
        made = time.perf_counter()
        scheduler.commit(plan, result)
        times.append(planned - began + time.perf_counter() - made)
    return fmean(times[20:]) * 1e6
