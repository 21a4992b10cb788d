"""Whether builds of the native CPU path for other processors compute the same bits as this one's.

    python -m bench.agree

Compiles bench/agree.cpp, small models with made-up weights, for every instruction set of kernels/cpu/build.py and runs
what can run: this processor's own builds, and those for ARM under qemu (Debian: apt-get install g++-aarch64-linux-gnu
qemu-user-static). A build that cannot run here is named. Exit code 1 where two disagree.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from kernels.cpu.build import VARIANTS, Variant, compiler, usable_variants

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-pthread", "-w")
ARM_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
SECONDS = 300


def lines_of(variant: Variant, machine: str, folder: Path) -> list[str] | str:
    """What the build prints, or why it cannot run."""
    is_ours = variant in usable_variants()
    if not is_ours and machine != "aarch64":
        return "this processor does not run it"
    if not is_ours and not (shutil.which(ARM_COMPILER) and shutil.which(EMULATOR)):
        return f"needs {ARM_COMPILER} and {EMULATOR}"
    made = folder / variant.name
    build = [compiler()] if is_ours else [ARM_COMPILER, "-static"]
    include = str(Path(__file__).parents[1] / "kernels" / "cpu")
    subprocess.run([*build, *FLAGS, *variant.flags, "-I", include, "-o", made, SOURCE], check=True)
    command = [str(made)] if is_ours else [EMULATOR, "-cpu", "max", str(made)]
    output: str = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS).stdout
    return output.splitlines()


def main() -> int:
    found: dict[str, list[str]] = {}
    with TemporaryDirectory() as folder:
        for machine, variants in VARIANTS.items():
            for variant in variants:
                lines = lines_of(variant, machine, Path(folder))
                if isinstance(lines, str):
                    print(f"{variant.name:<12} not run: {lines}")
                else:
                    found[variant.name] = lines
    first = next(iter(found.values()))
    for name, lines in found.items():
        differing = [line for line, other in zip(lines, first, strict=True) if line != other]
        print(f"{name:<12} " + (f"differs: {differing}" if differing else f"the same bits, {len(lines)} models"))
    return 0 if all(lines == first for lines in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
