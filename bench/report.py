"""Writes the newest results of speed into README.md and docs/performance.md, between their marks.

    python -m bench.report [--check]

A section stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. --check writes nothing; exit code 1 where a page
is not true to the newest results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.peers import figures

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")

Result = dict[str, Any]


def newest(name: str, folder: Path = RESULTS) -> Result | None:
    """The result `<name>-<date>.json` of the latest date; None where nothing was measured."""
    dated = sorted(
        path for path in folder.glob(f"{name}-*.json") if re.fullmatch(r"[\d-]+", path.stem[len(name) + 1 :])
    )
    found: Result | None = json.loads(dated[-1].read_text()) if dated else None
    return found


def where(result: Result) -> str:
    """A line that says on what and when, and whether the machine was free for it."""
    machine = result["machine"]
    told = f"{machine['num_cpus']} cores of {machine['cpu']}, {result['model']}, {machine['date']}."
    if machine["load_average"] <= machine["num_cpus"]:
        return told
    return (
        f"{told} **Provisional**: the machine was crowded with other work (load average {machine['load_average']:.0f})."
    )


def peers(result: Result) -> str:
    table = figures.table(result["lines"], result["seconds"])
    num_rounds = len({line["round"] for line in result["lines"]})
    told = [
        f"{where(result)} Medians of {num_rounds} round(s); `make bench-peers`.",
        "",
        table,
        "",
        bars(result),
        "",
        gates(result),
    ]
    return "\n".join(told)


def bars(result: Result) -> str:
    """How many times as fast as a peer, and whether that is what was aimed for."""
    names = {figures.SINGLE: "one request alone"}
    rows = ["| workload | ours | against | times as fast | aim |", "| --- | --- | --- | --- | --- |"]
    for ratio in result["ratios"]:
        verdict = "met" if ratio["met"] else "missed"
        workload = names.get(ratio["workload"], ratio["workload"])
        row = (workload, ratio["ours"], ratio["theirs"], f"{ratio['ratio']}x", f"{ratio['bar']}x: {verdict}")
        rows.append("| " + " | ".join(row) + " |")
    return "\n".join(rows)


def gates(result: Result) -> str:
    """The quality beside the speed."""
    told = [
        f"{line['workload']}: the tokens of {line['system']} are those of {other['system']}, all of them."
        for line in result["lines"]
        for other in result["lines"]
        if line["system"] == "millstream-float32" and other["system"] in figures.VLLM
        if "tokens_sha256" in line
        and all(line[key] == other.get(key) for key in ("workload", "round", "tokens_sha256"))
    ]
    for found in result.get("float32_against_transformers", []):
        total = found["equal"] + found["near_tie"] + found["wrong"]
        told.append(
            f"{found['workload']}: {found['equal']} of {total} float32 outputs are transformers' own, token by token, "
            f"{found['near_tie']} part at a near tie, {found['wrong']} are wrong."
        )
    if loss := result.get("int8_perplexity"):
        verdict = "passes" if loss["passes"] else "fails"
        lost = f"{loss['loss']['int8']:+.2%} from float32's (at most {loss['allowed']:.0%})"
        told.append(f"int8's perplexity is {lost}: {verdict}.")
    return " ".join(dict.fromkeys(told))  # each once, though every round says it


def coldstart(result: Result) -> str:
    rows = ["| stage | seconds |", "| --- | --- |"]
    rows += [f"| {stage} | {seconds:.2f} |" for stage, seconds in result["stages"].items()]
    rows.append(
        f"| **process start to first token** (at most {result['bar']:.0f}) | **{result['total_median']:.2f}** |"
    )
    return "\n".join([f"{where(result)} Medians of {len(result['totals'])} starts.", "", *rows])


def prefix(result: Result) -> str:
    seconds = {name: sorted(each)[len(each) // 2] for name, each in result["seconds"].items()}
    return (
        f"{where(result)} {result['what'].capitalize()}: {seconds['without']:.1f} s without the cache, "
        f"{seconds['cached']:.1f} s with it: {result['gain']}x (at least {result['bar']}x). "
        f"{result['num_cached_tokens']:,} of {result['num_prompt_tokens']:,} prompt tokens came from the cache; "
        f"the tokens written are {'the same' if result['same_tokens'] else 'NOT the same'}."
    )


def steps(result: Result) -> str:
    parts = [part for part in next(iter(result["steps"].values())) if part != "outside"]
    rows = [f"| sequences | {' | '.join(parts)} | outside |", "| --- " * (len(parts) + 2) + "|"]
    for batch, step in result["steps"].items():
        rows.append(f"| {batch} | {' | '.join(f'{step[part]:,.0f}' for part in parts)} | {step['outside']:.1%} |")
    return "\n".join([f"{where(result)} {result['dtype']}; microseconds, {result['time']}.", "", *rows])


SPEED = ("peers", "coldstart", "prefix")  # what README tells, each measured on a machine of its own


def speed() -> str:
    """README's few lines."""
    rows = ["| speed on a CPU | figure | command |", "| --- | --- | --- |"]
    names = {figures.SINGLE: "one request alone", "w32": "32 documents at once (W32)"}
    if found := newest("peers"):
        for ratio in found["ratios"]:
            verdict = "" if ratio["met"] else f"; the aim is {ratio['bar']}x"
            what = f"{names.get(ratio['workload'], ratio['workload'])}: {ratio['ours']} against {ratio['theirs']}"
            rows.append(f"| {what} | {ratio['ratio']}x as fast{verdict} | `make bench-peers` |")
    if found := newest("coldstart"):
        figure = f"{found['total_median']:.1f} s"
        rows.append(f"| a worker's process start to its first token | {figure} | `python -m bench.coldstart` |")
    if found := newest("prefix"):
        rows.append(f"| {found['what']}: gain of the prefix cache | {found['gain']}x | `python -m bench.prefix` |")
    if len(rows) == 2:
        return "Speed has not been measured yet."
    measured = [f"`bench.{name}`: {where(found)}" for name in SPEED if (found := newest(name))]
    return "\n".join([*rows, "", *measured])


WRITERS = {"peers": peers, "coldstart": coldstart, "prefix": prefix, "steps": steps}


def section(name: str) -> str:
    if name == "speed":
        return speed()
    result = newest(name)
    return "Not measured yet." if result is None else WRITERS[name](result)


def written(page: str) -> str:
    """The page with each section that it has from the newest results."""
    for name in (*WRITERS, "speed"):
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin in page:
            before, rest = page.split(begin, 1)
            page = f"{before}{begin}\n{section(name)}\n{end}{rest.split(end, 1)[1]}"
    return page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = [path for path in PAGES if written(path.read_text()) != path.read_text()]
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'is not true to the newest results' if options.check else 'written'}")
        if not options.check:
            path.write_text(written(path.read_text()))
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
