"""Ahead-of-time compilation: launches are noted as they are made, and resources are read from the binaries."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernels.binaries import Resources, UnreadableBinary, read_hsaco
from kernels.targets import TARGETS
from tests.conftest import skip_or_fail

ROOT = Path(__file__).parents[2]

# In a process of its own: in this one Triton may be an interpreter.
SCRIPT = """
import torch
from kernels.compile import compile_for, noted_launches
from kernels.rms_norm.triton import rms_norm
from kernels.targets import TARGETS

x, weight = torch.empty((5, 576), dtype=torch.float16, device="meta"), torch.empty(576, device="meta")
with noted_launches() as launches:
    rms_norm(x, weight, 1e-5)
(launch,) = launches
assert launch.types["x_ptr"] == "*fp16" and launch.types["SIZE"] == "constexpr", launch.types
assert launch.types["num_rows"] == "i32" and launch.types["eps"] == "fp32", launch.types
assert launch.constants["SIZE"] == 576 and launch.options["num_warps"] == 4, launch
for target in TARGETS:
    resources = compile_for(target, launch).resources
    print(target.name, resources.registers, resources.spilled_bytes)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    if find_spec("triton") is None:
        skip_or_fail("the package triton is not installed")
    return {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}


def test_a_kernel_compiles_for_every_target_without_a_gpu(environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _, _ in rows] == [target.name for target in TARGETS]
    assert all(8 <= int(registers) <= 255 and spilled == "0" for _, registers, spilled in rows)


def test_bytes_that_are_no_binary_are_refused() -> None:
    with pytest.raises(UnreadableBinary):
        read_hsaco(bytes(256), dynamic_shared_bytes=0)


def test_occupancy_is_bounded_by_each_resource_in_turn() -> None:
    ampere = TARGETS[0]
    assert ampere.warps_held(Resources(32, 0, 0), num_warps=4) == 64
    assert ampere.warps_held(Resources(128, 0, 0), num_warps=4) == 16  # 65536 / (128 * 32) warps
    assert ampere.warps_held(Resources(32, 0, 40 * 1024), num_warps=4) == 16  # 164 / 41 programs
    assert ampere.warps_held(Resources(32, 0, 0), num_warps=1) == 32  # programs of a multiprocessor
