"""Ours and what a user would pick instead, alternately on the same work, with a quality gate beside the speed.

    python -m bench.peers [--into FOLDER] [--peers vllm,llama,transformers] [--workloads w32,bulk32|FILE] [--rounds 3]

Installs each peer in an environment of its own under FOLDER (about 15 minutes the first time), then runs every system
in turn, round by round, one process at a time: nothing else may run on the machine meanwhile. A workload is `w32` (the
lengths of 32 real documents), `bulk32` (pieces of the bench's corpus) or a file; all submitted at once. Besides, the
first prompt of the first workload alone, 64 tokens. Writes bench/results/peers-<date>.json and prints the table.

Gates: each token of float32 must be transformers' first choice behind those before it, near ties aside; int8's
perplexity must lie within 1% of float32's. Exit code 1 where a gate fails; missed bars are told, not hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import workload
from bench.machine import machine
from bench.peers import figures
from bench.peers.install import PEERS, bare_environment, install, versions
from bench.peers.systems import SYSTEMS, System, checking_command

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    options = _options()
    peers = [peer for peer in options.peers.split(",") if peer]
    install(options.into, peers, options.model)
    if options.install_only:
        return 0
    wanted = [system for system in SYSTEMS if system.peer is None or system.peer in peers]
    if options.systems:
        wanted = [system for system in wanted if system.name in options.systems.split(",")]
    with tempfile.TemporaryDirectory(prefix="millstream-peers-") as scratch:
        workloads = _written(Path(scratch), options.workloads.split(","), options.model)
        lines = json.loads(options.add_to.read_text())["lines"] if options.add_to else []
        num_before = max((line["round"] + 1 for line in lines), default=0)
        lines += [
            line
            for number in range(options.rounds)
            for system in wanted
            if system.is_leading or number == 0
            for line in _measured(system, num_before + number, options, workloads, Path(scratch) / "outputs")
        ]
        _write(options, lines, {}, peers)  # half an hour's work, which no fault of a gate may lose
        names = {system.name for system in wanted}
        gates: dict[str, Any] = {}
        if options.gates and "transformers" in peers and "millstream-float32" in names:
            gates["float32_against_transformers"] = _checked(options, workloads, Path(scratch) / "outputs")
        if options.gates and "millstream-int8" in names:
            gates["int8_perplexity"] = _perplexity(options.model, Path(scratch) / "perplexity.json")
    return _tell(_write(options, lines, gates, peers), gates)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--into", type=Path, default=Path.home() / ".cache" / "millstream" / "peers")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--systems", help=f"only these of {', '.join(system.name for system in SYSTEMS)}")
    parser.add_argument("--workloads", default="w32,bulk32")
    parser.add_argument("--model", default="smollm2-135m", help="an alias of the catalog")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--under", default="", metavar="COMMAND", help="runs each measured process under this, as nice")
    parser.add_argument("--add-to", type=Path, help="an earlier report of this machine, whose rounds count as well")
    parser.add_argument("--gates", action=argparse.BooleanOptionalAction, default=True, help="check the quality too")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--run-seconds", type=float, default=900, help="the longest that one process may take")
    parser.add_argument("--output", type=Path, help="file; bench/results/peers-<date>.json")
    return parser.parse_args()


def _written(scratch: Path, names: list[str], model: str) -> dict[str, Path]:
    """Each workload as a file, by its short name."""
    from engine.text.tokenizer import Tokenizer
    from engine.weights.resolve import resolve

    tokenizer = Tokenizer(resolve(model))
    files = {Path(name).stem: scratch / f"{Path(name).stem}.json" for name in names}
    for name, file in zip(names, files.values(), strict=True):
        file.write_text(json.dumps(workload.load(name, tokenizer)))
    return files


def _measured(
    system: System, number: int, options: argparse.Namespace, workloads: dict[str, Path], outputs: Path
) -> list[figures.Line]:
    """What one process of the system printed; it is shown as it comes. Ends everything where it failed."""
    command = [*shlex.split(options.under), *system.full_command(options.into, workloads, outputs / system.name)]
    environment = dict(os.environ) if system.peer is None else bare_environment()
    busy = machine()["load_average"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=options.run_seconds
    )
    printed = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    lines = [{"system": system.name, "round": number, **line, "load_average": busy} for line in printed]
    for line in lines:
        speed = f"{line['seconds']:8.2f} s {line['total_tokens_per_s']:8.1f} tok/s"
        others = f"alone {line['single_s']:6.2f} s   ready {line['ready_s']:6.1f} s"
        print(f"{number}  {system.name:<24} {line['workload']:<10} {speed}   {others}", flush=True)
    if done.returncode:
        print(f"{number}  {system.name}: failed ({done.returncode}):\n{done.stderr[-2000:]}", file=sys.stderr)
        raise SystemExit(1)
    return lines


def _checked(options: argparse.Namespace, workloads: dict[str, Path], outputs: Path) -> list[dict[str, Any]]:
    """transformers' verdict on our float32 outputs of the last round, by workload."""
    command = checking_command(options.into, workloads, outputs / "millstream-float32")
    done = subprocess.run(command, env=bare_environment(), capture_output=True, text=True, check=True)
    return [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]


def perplexity_arguments(model: str, out: Path) -> list[str]:
    return ["--model", model, "--out", str(out)]


def _perplexity(model: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.perplexity", *perplexity_arguments(model, out)]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # it fails where the gate is missed, and says so
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _write(
    options: argparse.Namespace, lines: list[figures.Line], gates: dict[str, Any], peers: list[str]
) -> dict[str, Any]:
    """The report, which is also put into its file."""
    seconds = figures.seconds_of(lines)
    ratios = figures.ratios_of(seconds)
    report = {
        "what": "ours and the peers, alternately on the same work; seconds are medians over the rounds",
        "machine": machine(),
        "versions": versions(options.into, peers),
        "model": options.model,
        "seconds": seconds,
        "ratios": ratios,
        **gates,
        "lines": lines,
    }
    output = options.output or RESULTS / f"peers-{report['machine']['date']}.json"
    output.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _tell(report: dict[str, Any], gates: dict[str, Any]) -> int:
    print("\n" + figures.table(report["lines"], report["seconds"]) + "\n")
    for ratio in report["ratios"]:
        verdict = "met" if ratio["met"] else "MISSED"
        print(
            f"{ratio['workload']}: {ratio['ours']} is {ratio['ratio']}x {ratio['theirs']}; "
            f"the bar is {ratio['bar']}x: {verdict}"
        )
    for name, found in gates.items():
        print(f"{name}: {json.dumps(found)}")
    wrong = any(found["wrong"] for found in gates.get("float32_against_transformers", []))
    return 1 if wrong or not gates.get("int8_perplexity", {"passes": True})["passes"] else 0


if __name__ == "__main__":
    sys.exit(main())
