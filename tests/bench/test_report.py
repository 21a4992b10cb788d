"""README and docs/performance.md say what was measured last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import report

MACHINE = {"cpu": "A Processor", "num_cpus": 2, "date": "2026-01-31", "load_average": 0.4}


def peers_result(ratio: float) -> dict[str, Any]:
    lines = [
        {
            "system": name,
            "workload": "w32",
            "round": 0,
            "seconds": seconds,
            "single_s": 1.0,
            "ready_s": 2.0,
            "tokens_sha256": "same",
        }
        for name, seconds in (("millstream-float32", 10.0), ("vllm-float32-eager", 10.0 * ratio))
    ]
    seconds = report.figures.seconds_of(lines)
    return {
        "machine": MACHINE,
        "model": "a-model",
        "lines": lines,
        "seconds": seconds,
        "ratios": report.figures.ratios_of(seconds),
        "float32_against_transformers": [{"workload": "w32", "equal": 30, "near_tie": 2, "wrong": 0}],
        "int8_perplexity": {"loss": {"float32": 0.0, "int8": 0.0123}, "allowed": 0.01, "passes": False},
    }


def test_the_pages_are_true_to_the_newest_results() -> None:
    for page in report.PAGES:
        text = page.read_text()
        assert report.written(text) == text, f"{page.name}: run `python -m bench.report`"


def test_the_newest_result_is_the_latest_days(tmp_path: Path) -> None:
    for name in ("peers-2026-01-30", "peers-2026-02-01", "peers-2026-01-31", "peers-notes"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    assert report.newest("peers", tmp_path) == {"name": "peers-2026-02-01"}
    assert report.newest("prefix", tmp_path) is None


def test_a_missed_bar_and_a_missed_gate_are_told() -> None:
    told = report.peers(peers_result(ratio=1.2))
    assert "| w32 | millstream-float32 | vllm-float32-eager | 1.2x | 1.25x: missed |" in told
    assert "30 of 32 float32 outputs are transformers' own" in told
    assert "+1.23% from float32's (at most 1%): fails." in told
    assert "1.25x: met" in report.peers(peers_result(ratio=1.3))


def test_a_crowded_machine_and_equal_tokens_are_told() -> None:
    result = peers_result(ratio=1.3)
    told = report.peers(result)
    assert "Provisional" not in told
    assert "the tokens of millstream-float32 are those of vllm-float32-eager" in told
    result["lines"][0]["tokens_sha256"] = "other"
    result["machine"] = {**MACHINE, "load_average": 16.2}
    told = report.peers(result)
    assert "**Provisional**: the machine was crowded with other work (load average 16)" in told
    assert "the tokens of" not in told


def test_only_what_stands_between_the_marks_is_written() -> None:
    page = "before\n<!-- prefix:begin -->\nold\n<!-- prefix:end -->\nafter <!-- other:begin --> kept\n"
    written = report.written(page)
    assert written.startswith("before\n<!-- prefix:begin -->\n")
    assert written.endswith("\n<!-- prefix:end -->\nafter <!-- other:begin --> kept\n")
    assert "\nold\n" not in written
    assert report.written(written) == written


def test_each_speed_is_told_with_the_machine_that_it_was_measured_on() -> None:
    told = report.speed()
    for name in report.SPEED:
        found = report.newest(name)
        assert found is not None and f"`bench.{name}`: {report.where(found)}" in told
