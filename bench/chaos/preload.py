"""Small C libraries that stand between a process and its system: built here, loaded by LD_PRELOAD."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.chaos.yard import NotHere


def preload(name: str, folder: Path) -> dict[str, str]:
    """Builds `name`.c of this package into `folder`; the variable that makes a process load it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotHere("there is no C compiler; on Debian: apt-get install gcc libc6-dev")
    source, library = Path(__file__).with_name(f"{name}.c"), folder / f"{name}.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}
