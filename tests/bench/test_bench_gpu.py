"""bench.gpu goes its whole way without a GPU: at tiny sizes, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu.budget import Budget
from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    if find_spec("triton") is None:
        skip_or_fail("the package triton is not installed")
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False)


def test_the_dry_run_measures_everything_and_fails_at_nothing(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = run("--dry-run", "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(output.read_text())
    assert report == json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == [] and report["dry_run"]
    assert report["correctness"]["num_wrong"] == 0 and len(report["correctness"]["cases"]) > 30
    assert all("error" not in each for each in report["kernels"]["kernels"].values())
    assert len(report["kernels"]["kernels"]) > 15
    assert report["serving"]["graphs_replayed"] > 2
    assert {"prefill", "2 decodes, graphs", "2 decodes, kernel by kernel"} <= set(report["serving"])
    assert report["swap"]["blocks"] == 8
    assert report["quantized"]["2 decodes, int8"]["tokens_per_second"] > 0
    assert [report[section].get("skipped", []) for section in ("correctness", "kernels", "serving")] == [[], [], []]


def test_no_time_leaves_what_was_measured_and_says_what_was_not(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    done = run("--dry-run", "--seconds", "0.5", "--output", str(output))
    report: dict[str, Any] = json.loads(output.read_text())
    not_begun = [each.split(":")[0] for each in report["failed"]]
    assert done.returncode == 1 and "roofs" in report
    assert "swap" in not_begun
    assert report.get("correctness", {"skipped": ["all"]})["skipped"]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = run()
    assert done.returncode == 0 and "no GPU" in done.stdout


def test_a_wrong_number_is_wrong() -> None:
    from bench.gpu.correctness import judged  # imports triton: first must the kernels' tests choose its interpreter

    right = torch.tensor([1.0, 2.0, 4.0])
    assert judged(right, right.double(), torch.float32)["ok"]
    assert judged(right.half(), right.double() * (1 + 1e-3), torch.float16)["ok"]
    assert not judged(right, right.double() + 1e-3, torch.float32)["ok"]
    assert not judged(torch.tensor([1.0, torch.nan, 4.0]), right.double(), torch.float32)["ok"]
    assert judged(right, right.clone(), None)["ok"] and not judged(right, right.flip(0), None)["ok"]
    assert not judged(right, right[:2], None)["ok"]


def test_a_budget_ends() -> None:
    now = [0.0]
    budget = Budget(10.0, clock=lambda: now[0])
    part = budget.part(100.0)
    skipped: list[str] = []
    begun = []
    for item in part.while_it_lasts([1, 2, 3, 4], skipped, str):
        begun.append(item)
        now[0] += 5.0
    assert (begun, skipped, budget.seconds_left) == ([1, 2], ["3", "4"], 0.0)
