"""Compiles the native CPU path once per instruction set into a cache; `python -m kernels.cpu.build` does it early.

One source for all: the compiler's flags choose the width of vectors, and every build computes the same bits.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).parent
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set: what the processor must have, and how the compiler is told."""

    name: str
    needs: frozenset[str]  # flags as /proc/cpuinfo spells them
    flags: tuple[str, ...]


_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2"})
_AVX512_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512")

# Best first.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "x86_64": (
        Variant("avx512vnni", _AVX512 | {"avx512_vnni"}, (*_AVX512_FLAGS, "-mavx512vnni")),
        Variant("avx512", _AVX512, _AVX512_FLAGS),
        Variant("avx2", frozenset({"avx2", "fma", "bmi2"}), ("-march=x86-64-v3",)),
    ),
    "aarch64": (
        Variant("neon-dot", frozenset({"asimd", "asimddp"}), ("-march=armv8.2-a+dotprod",)),
        Variant("neon", frozenset({"asimd"}), ("-march=armv8-a",)),
    ),
}


class BuildUnavailable(Exception):
    """The native path cannot be built here; the message says why and what would help."""


def processor_flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


def usable_variants(machine: str | None = None, flags: frozenset[str] | None = None) -> list[Variant]:
    """What this processor runs, best first; empty where there is none."""
    has = processor_flags() if flags is None else flags
    return [variant for variant in VARIANTS.get(machine or platform.machine(), ()) if variant.needs <= has]


def compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise BuildUnavailable("no C++ compiler found; install one (Debian: apt-get install g++), or set CXX")


def cache_folder() -> Path:
    root = os.environ.get("MILLSTREAM_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "millstream") / "native"


def build(variant: Variant) -> Path:
    """The shared library of a variant, compiled if the cache lacks it. Raises BuildUnavailable."""
    sources = sorted(path for path in _SOURCE.iterdir() if path.suffix in (".h", ".cpp"))
    key = hashlib.sha256("\0".join([*_FLAGS, *variant.flags, *(path.read_text() for path in sources)]).encode())
    target = cache_folder() / f"{variant.name}-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler(), *_FLAGS, *variant.flags, "-o", str(made), str(_SOURCE / "forward.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildUnavailable(f"{' '.join(command)} failed: {done.stderr.strip()[:1000]}")
        made.replace(target)  # whole or not at all: another process may build the same
    return target


def main() -> int:
    variants = usable_variants()
    if not variants:
        print(f"native CPU path: none for this processor ({platform.machine()}); the torch path serves")
        return 0
    try:
        path = build(variants[0])
    except BuildUnavailable as error:
        print(f"native CPU path: not built, the slower torch path serves. {error}")
        return 0
    print(f"native CPU path: {variants[0].name}, {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
