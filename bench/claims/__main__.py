"""The claims about memory and scheduling, measured: a table, then one JSON line.

    python -m bench.claims [--model smollm2-135m | --no-model] [--output FILE]

Simulated rows run the real scheduler, block pool and caches on a clock of GPU-like costs (25 ms a step, 50 us a token).
Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.claims import memory, scheduling, speculation
from bench.machine import machine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.claims", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--no-model", action="store_true", help="leave out what needs the real model")
    parser.add_argument("--output", type=Path, help="also write the JSON there")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "kv_utilization": memory.kv_utilization(),
        "three_choices": [memory.three_choices(16), memory.three_choices(8)],
        "dialogue": memory.dialogue(),
        "capacity": memory.capacity(),
        "mixed_simulated": scheduling.mixed_simulated(),
        "swap_curve": memory.swap_curve(),
        "speculation": speculation.simulated(),
        "decision_cost": scheduling.decision_cost(),
    }
    if not options.no_model:
        found["mixed_on_this_cpu"] = scheduling.mixed_on_this_cpu(options.model)
    rows = list(table(found))
    for claim, measured, bar, is_met in rows:
        print(f"{'ok  ' if is_met else 'MISS'} {claim:<66} {measured:<44} {bar}")
    line = json.dumps({**found, **machine()})
    print(line)
    if options.output:
        options.output.write_text(line + "\n")
    return 0 if all(is_met for *_, is_met in rows) else 1


def table(found: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """(claim, measured, bar, whether it is met)"""
    kv, choices, talk = found["kv_utilization"], found["three_choices"][0], found["dialogue"]
    mixed, seats = found["mixed_simulated"], found["capacity"]
    rows = [
        (
            "KV in use: contiguous (prompt + max_tokens) against paged",
            f"{kv['contiguous']:.0%} against {kv['paged']:.1%}",
            "waste at most 4%",
            kv["paged_waste"] <= kv["bar_waste"],
        ),
        (
            "n=3, 1,000-token prompt, 100 tokens each: KV saved (mean, at the end)",
            f"{choices['saved_mean']:.1%}, {choices['saved_at_the_end']:.1%}",
            "at least 60%",
            choices["saved_mean"] >= choices["bar_saved"],
        ),
        (
            "the same: first token of the last choice, shared against apart",
            f"{choices['first_token_seconds_shared']:.3f} s against {choices['first_token_seconds_apart']:.3f} s",
            "lower",
            choices["first_token_seconds_shared"] < choices["first_token_seconds_apart"],
        ),
        (
            "20 turns: tokens computed beyond the new ones, at most",
            str(talk["computed_beyond_new_at_most"]),
            f"at most a block, {talk['bar_beyond_new']}",
            talk["computed_beyond_new_at_most"] <= talk["bar_beyond_new"],
        ),
        (
            "24 GB, Qwen2.5-3B fp16, 10,000 tokens: paged against contiguous",
            f"{seats['paged']} against {seats['contiguous']}",
            "about 40 against 12",
            seats["paged"] >= 38 and seats["contiguous"] <= 13,
        ),
        (
            "mixed load, simulated GPU, steady arrivals: p99 of short, static / ours",
            f"{mixed['steady']['p99_ratio']:.1f}x",
            "at least 5x",
            mixed["steady"]["p99_ratio"] >= mixed["bar_p99_ratio"],
        ),
        (
            "mixed load, simulated GPU, all at once: throughput, ours / static",
            f"{mixed['at_once']['throughput_ratio']:.1f}x",
            "at least 3x",
            mixed["at_once"]["throughput_ratio"] >= mixed["bar_throughput_ratio"],
        ),
    ]
    drafts = found["speculation"]
    rows.append(
        (
            "draft 2 ms, target 50 ms, acceptance 0.7, simulated: K = 5 (and adaptive)",
            f"{drafts['speedup']:.2f}x ({drafts['speedup_adaptive']:.2f}x)",
            "2.45x +- 0.1",
            drafts["bar"][0] <= drafts["speedup"] <= drafts["bar"][1],
        )
    )
    if cpu := found.get("mixed_on_this_cpu"):
        measured = f"p99 {cpu['p99_ratio']:.1f}x, throughput {cpu['throughput_ratio']:.1f}x"
        rows.append(("mixed load with the real model on this CPU", measured, "no bar", True))
    for row in found["decision_cost"]["rows"]:
        bar = found["decision_cost"]["bar_us"].get(str(row["num_seqs"]))
        name = f"scheduling and blocks of a step, {row['num_seqs']} sequences, {row['num_waiting']:,} waiting"
        rows.append((name, f"{row['us']:.0f} us", f"at most {bar} us" if bar else "", bar is None or row["us"] <= bar))
    for row in found["swap_curve"]["rows"]:
        measured = f"{row['tokens_per_s']:.0f} tok/s, p99 {row['p99_seconds']:.1f} s, {row['preemptions']} preemptions"
        rows.append((f"pool of {row['num_kv_blocks']} blocks, {row['mode']}", measured, "", True))
    return rows


if __name__ == "__main__":
    sys.exit(main())
