"""From measured lines to ratios and bars. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]
"""One line of a runner: `system`, `workload`, `seconds`, `total_tokens_per_s`, `single_s`, `ready_s`, ..."""

SINGLE = "single"


@dataclass(frozen=True, slots=True)
class Bar:
    """`ours` must be at least `factor` times as fast as the fastest of `theirs`."""

    workload: str
    ours: str
    theirs: tuple[str, ...]
    factor: float


VLLM = ("vllm-float32-compiled", "vllm-float32-eager")
BARS = [
    Bar("w32", "millstream-float32", VLLM, 1.25),
    Bar("w32", "millstream-int8", VLLM, 2.0),
    Bar(SINGLE, "millstream-float32", VLLM, 2.0),
    Bar(SINGLE, "millstream-int8", ("llama.cpp-Q4_0",), 2.0),
]


def seconds_of(lines: list[Line]) -> dict[str, dict[str, float]]:
    """The median over rounds, by workload and system. `single` is the first prompt of the first workload alone."""
    found: dict[str, dict[str, list[float]]] = {}
    first = lines[0]["workload"] if lines else None
    for line in lines:
        found.setdefault(line["workload"], {}).setdefault(line["system"], []).append(line["seconds"])
        if line["workload"] == first:
            found.setdefault(SINGLE, {}).setdefault(line["system"], []).append(line["single_s"])
    return {
        workload: {system: round(statistics.median(each), 3) for system, each in systems.items()}
        for workload, systems in found.items()
    }


def ratios_of(seconds: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Each bar whose both sides were measured: how many times as fast, and whether that is enough."""
    ratios = []
    for bar in BARS:
        measured = seconds.get(bar.workload, {})
        theirs = {name: measured[name] for name in bar.theirs if name in measured}
        if bar.ours in measured and theirs:
            best = min(theirs, key=lambda name: theirs[name])
            ratio = round(theirs[best] / measured[bar.ours], 2)
            ratios.append(
                {
                    "workload": bar.workload,
                    "ours": bar.ours,
                    "theirs": best,
                    "ratio": ratio,
                    "bar": bar.factor,
                    "met": ratio >= bar.factor,
                }
            )
    return ratios


def table(lines: list[Line], seconds: dict[str, dict[str, float]]) -> str:
    """Markdown: a line for each system, the fastest on the first workload first."""
    workloads = [name for name in seconds if name != SINGLE]
    ready: dict[str, list[float]] = {}
    for line in lines:
        ready.setdefault(line["system"], []).append(line["ready_s"])
    head = ["system", *(f"{name}, s" for name in workloads), "one request, s", "ready after, s"]
    rows = [head, ["---"] * len(head)]
    for system in sorted(ready, key=lambda name: seconds[workloads[0]].get(name, float("inf"))):
        cells = [f"{seconds[name][system]:.1f}" if system in seconds[name] else "" for name in workloads]
        alone = f"{seconds[SINGLE][system]:.2f}" if system in seconds[SINGLE] else ""
        rows.append([system, *cells, alone, f"{statistics.median(ready[system]):.1f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
