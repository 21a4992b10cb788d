"""The parts of a step that `bench.steps` names are there, and make up the step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.steps import PARTS


@pytest.mark.real_model
def test_each_part_of_a_step_is_timed(tmp_path: Path) -> None:
    report = tmp_path / "steps.json"
    command = [sys.executable, "-m", "bench.steps", "--batches", "2", "--cpu-time", "--output", str(report)]
    subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=200)
    parts = json.loads(report.read_text())["steps"]["2"]
    assert all(parts[part] > 0 for part in PARTS)
    assert 0 < parts["outside"] < 1
