"""The GPUs that kernels are compiled for, and how many programs of a kernel one of their multiprocessors holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.binaries import Resources


@dataclass(frozen=True, slots=True)
class Target:
    """Limits of one multiprocessor, from the vendors' architecture manuals."""

    name: str
    backend: Literal["cuda", "hip"]
    architecture: int | str
    threads_per_warp: int
    max_warps: int
    registers: int  # of 32 bits; a thread's are rounded up to register_step
    register_step: int
    shared_bytes: int
    max_programs: int
    reserved_shared_bytes: int = 0  # of each program, where the binary's figure leaves it out

    def warps_held(self, resources: Resources, num_warps: int) -> int:
        """How many warps of such programs are resident at once: an estimate of occupancy, against max_warps."""
        registers = -(-max(resources.registers, 1) // self.register_step) * self.register_step
        per_program = registers * self.threads_per_warp * num_warps
        shared = resources.shared_bytes + self.reserved_shared_bytes
        num_programs = min(
            self.max_warps // num_warps,
            self.registers // per_program,
            self.shared_bytes // shared if shared else self.max_programs,
            self.max_programs,
        )
        return num_programs * num_warps


KIB = 1024
TARGETS = (
    Target("sm_80", "cuda", 80, 32, 64, 65536, 8, 164 * KIB, 32, reserved_shared_bytes=KIB),  # A100
    Target("sm_90", "cuda", 90, 32, 64, 65536, 8, 228 * KIB, 32),  # H100, H200
    Target("sm_100", "cuda", 100, 32, 64, 65536, 8, 228 * KIB, 32),  # B200
    Target("gfx942", "hip", "gfx942", 64, 32, 4 * 512 * 64, 8, 64 * KIB, 32),  # MI300: four units of 512 x 64 lanes
)
