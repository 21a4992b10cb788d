"""Claims about KV memory: waste, sharing between choices, dialogues, capacity, swap."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.claims.simulated import Ask, percentile, serve, simulated
from engine import EngineConfig, SamplingParams
from engine.models.families import decoder_config
from engine.planner import plan_capacity

QWEN = Path(__file__).parents[1] / "models" / "qwen2.5-3b.json"


def kv_utilization() -> dict[str, Any]:
    """Bulk of 32 documents that may write 512 tokens and mostly write fewer: reserved contiguously, and in blocks."""
    rng = random.Random(1)
    config = EngineConfig(num_kv_blocks=4096, max_num_seqs=32, fake_eos_every=160, fake_seconds_per_step=0.02)
    llm, clock = simulated(config)
    asks = [
        Ask(index, rng.randint(60, 700), SamplingParams(temperature=1.0, seed=index, max_tokens=512))
        for index in range(32)
    ]
    run = serve(llm, clock, asks, idle=clock.advance)
    waste = fmean(each.kv_waste for each in run.stats if each.num_held_blocks)
    used, reserved = 0, 0
    for ask in asks:  # a contiguous cache reserves prompt + max_tokens for as long as the request lives
        tokens = ask.num_prompt_tokens
        written = _num_written(ask, config)
        used += sum(range(tokens, tokens + written))
        reserved += (tokens + 512) * written
    return {"contiguous": used / reserved, "paged": 1 - waste, "paged_waste": waste, "bar_waste": 0.04}


def _num_written(ask: Ask, config: EngineConfig) -> int:
    llm, _ = simulated(config)
    return len(llm.generate([ask.prompt], ask.params)[0].choices[0].token_ids)


def three_choices(block_size: int = 16) -> dict[str, Any]:
    """n = 3 on a 1,000-token prompt, 100 tokens each, against the same three as requests of their own."""
    config = EngineConfig(
        num_kv_blocks=2048,
        block_size=block_size,
        enable_prefix_caching=False,
        fake_seconds_per_step=0.01,
        fake_seconds_per_token=0.0001,
    )
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True)
    shared_llm, clock = simulated(config)
    shared = serve(
        shared_llm,
        clock,
        [Ask(0, 1000, SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True, n=3))],
        idle=clock.advance,
    )
    apart_llm, clock = simulated(config)
    apart = serve(apart_llm, clock, [Ask(index, 1000, params) for index in range(3)], idle=clock.advance)
    decoding = [each.num_held_blocks for each in shared.stats if each.num_running >= 3]
    copies = [each.num_held_blocks for each in apart.stats if each.num_running >= 3 and each.num_held_blocks][-100:]
    return {
        "block_size": block_size,
        "saved_mean": 1 - fmean(decoding) / fmean(copies),
        "saved_at_the_end": 1 - max(decoding) / max(copies),
        "first_token_seconds_shared": max(shared.first_tokens.values()),
        "first_token_seconds_apart": max(apart.first_tokens.values()),
        "bar_saved": 0.6,
    }


def dialogue(num_turns: int = 20) -> dict[str, Any]:
    """A dialogue whose every turn sends all that was said: what is computed again."""
    llm, _ = simulated(EngineConfig(num_kv_blocks=2048, fake_seconds_per_step=0.01))
    said: list[int] = []
    turns = []
    for turn in range(num_turns):
        said += [32 + (turn * 31 + place) % 90 for place in range(45)]
        before = llm.stats().num_computed_tokens
        output = llm.generate([{"prompt_token_ids": said}], SamplingParams(temperature=0.0, max_tokens=30))[0]
        computed = llm.stats().num_computed_tokens - before
        turns.append({"prompt": len(said), "cached": output.num_cached_tokens, "computed": computed})
        said += output.choices[0].token_ids
    new = 45 + 30
    return {
        "turns": turns,
        "computed_beyond_new_at_most": max(turn["computed"] - new for turn in turns),
        "bar_beyond_new": llm.config.block_size,
    }


def capacity() -> dict[str, Any]:
    """Qwen2.5-3B in fp16 on a 24 GB GPU, dialogues of 10,000 tokens."""
    config = decoder_config(json.loads(QWEN.read_text()))
    planned = plan_capacity(config, gpu_memory_bytes=24 * 10**9, context_tokens=10_000)
    return {"paged": planned.num_sequences_paged, "contiguous": planned.num_sequences_contiguous}


def swap_curve() -> dict[str, Any]:
    """Throughput and p99 over shrinking pools: swap against recompute, costs of a GPU."""
    rows = []
    for num_blocks in (600, 300, 200, 120):
        for mode in ("recompute", "swap"):
            config = EngineConfig(
                num_kv_blocks=num_blocks,
                max_num_seqs=32,
                enable_prefix_caching=False,
                preemption_mode=mode,
                swap_space=1.0 if mode == "swap" else 0.0,
                fake_seconds_per_step=0.02,
                fake_seconds_per_token=0.0001,
            )
            llm, clock = simulated(config, seconds_per_block_copy=0.0001)
            params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
            run = serve(llm, clock, [Ask(index, 120, params) for index in range(64)], idle=clock.advance)
            last = run.stats[-1]
            rows.append(
                {
                    "num_kv_blocks": num_blocks,
                    "mode": mode,
                    "tokens_per_s": run.tokens_per_second,
                    "p99_seconds": percentile(list(run.latencies.values()), 0.99),
                    "preemptions": last.num_preempted_recompute + last.num_preempted_swap,
                }
            )
    return {"rows": rows}
