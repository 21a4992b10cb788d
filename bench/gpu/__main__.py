"""Correctness and speed on a GPU, in one go and well inside eight minutes.

    python -m bench.gpu [--seconds 420] [--output FILE] [--dry-run]

Needs torch, triton, numpy, msgspec, safetensors and tokenizers, nothing downloaded. Each kernel against fp64; each
kernel's time against the measured copy bandwidth and matrix rate; tokens per second of a Llama-8B-shaped model with
random weights, prefill and decode, with graphs and without, in int8; swap bandwidth. Prints tables, ends with one JSON
line, and writes it to bench/results/gpu-NAME-DATE.json, after each section anew: what was measured is kept, whatever
comes next.
Without a GPU it says so and exits 0. --dry-run goes the whole way on this CPU at tiny sizes, in Triton's interpreter.
Exit code 1 where a kernel is wrong or a section failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=420.0, help="when to stop beginning anything new")
    parser.add_argument("--output", type=Path, help="where the JSON goes; a dry run writes none otherwise")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not (options.dry_run or torch.cuda.is_available()):
        print("bench.gpu: this machine has no GPU that torch can use, so there is nothing to measure")
        return 0
    from bench.gpu.machine import gpu, interpreter

    machine = interpreter() if options.dry_run else gpu()
    report: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), **machine.describe()}
    output = options.output or (None if options.dry_run else _RESULTS / _file_name(report))
    run_sections(machine, report, options.seconds, lambda: _write(output, report))
    print(json.dumps(report))
    return 0 if not report["failed"] and report.get("correctness", {}).get("num_wrong") == 0 else 1


def run_sections(machine: Any, report: dict[str, Any], seconds: float, save: Callable[[], None]) -> None:
    """Fills `report` section by section; a section that fails leaves its error, and the next one begins."""
    from bench.gpu import correctness, kernels, roofs
    from bench.gpu.budget import Budget
    from bench.gpu.serving import Serving

    budget = Budget(seconds)
    report["failed"] = []
    measured: list[roofs.Roofs] = []
    served: list[Serving] = []

    def ceilings() -> dict[str, Any]:
        measured.append(roofs.measure(machine))
        return asdict(measured[0])

    def serving() -> dict[str, Any]:
        served.append(Serving(machine))
        return served[0].measure(measured[0], budget.part(0.5 * seconds))

    sections: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("roofs", ceilings),
        ("correctness", lambda: correctness.check(machine, budget.part(0.4 * seconds))),
        ("kernels", lambda: kernels.time_all(machine, measured[0], budget.part(0.3 * seconds))),
        ("serving", serving),
        ("swap", lambda: served[0].swap(measured[0])),
        ("quantized", lambda: served[0].quantized(measured[0], budget.part(0.2 * seconds))),
    ]
    for name, section in sections:
        if budget.seconds_left <= 0:
            report["failed"].append(f"{name}: no time was left")
            continue
        try:
            report[name] = section()
        except Exception as error:  # what is measured already is kept
            traceback.print_exc()
            report["failed"].append(f"{name}: {type(error).__name__}: {error}")
            continue
        _print(name, report[name])
        save()
    save()


def _print(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name}")
    for key, value in _flat(found):
        print(f"  {key:<64} {value}", flush=True)


def _flat(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Lines of a table: one for each thing that was measured."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
            lines += _flat(value)
        elif isinstance(value, dict):
            lines.append((key, "  ".join(f"{each} {number}" for each, number in value.items())))
        else:
            lines.append((key, f"{value:.4g}" if isinstance(value, float) else str(value)))
    return lines


def _file_name(report: dict[str, Any]) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", str(report["gpu"]).lower()).strip("-")
    return f"gpu-{name}-{report['date']}.json"


def _write(output: Path | None, report: dict[str, Any]) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    sys.exit(main())
