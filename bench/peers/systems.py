"""What is compared: ours in each form, and each peer as its own documentation would have it run here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.install import python_of

RUNNERS = Path(__file__).parent / "runners"


@dataclass(frozen=True, slots=True)
class System:
    """One thing to measure. `peer`: whose environment it needs, None for ours."""

    name: str
    peer: str | None
    command: Callable[[Path], list[str]]  # of the folder of installations
    is_leading: bool = True  # far slower ones are measured once, the rest in every round

    def full_command(self, into: Path, workloads: dict[str, Path], outputs: Path) -> list[str]:
        named = [f"{name}={file}" for name, file in workloads.items()]
        if self.peer is None:
            return [*self.command(into), "--workload", *map(str, workloads.values()), "--outputs", str(outputs)]
        return [*self.command(into), "--workloads", *named, "--outputs", str(outputs)]


def _ours(dtype: str, what: str = "", *options: str, is_leading: bool = True) -> System:
    """As it comes (on the native path `ngram` guesses, and all is invariant), or with `options`, which `what` names."""
    command = [sys.executable, "-m", "bench.run", "--dtype", dtype, *options]
    return System(f"millstream-{dtype}{what}", None, lambda into: command, is_leading)


def _vllm(name: str, *options: str) -> System:
    return System(name, "vllm", lambda into: _runner(into, "vllm", "run_vllm.py", "hf", *options))


def _llama(form: str, is_leading: bool) -> System:
    name = f"llama.cpp-{form}"
    return System(name, "llama", lambda into: _runner(into, "llama", "run_llama.py", f"{form}.gguf"), is_leading)


def _runner(into: Path, peer: str, script: str, model: str, *options: str) -> list[str]:
    return [str(python_of(into, peer)), str(RUNNERS / script), str(into / "models" / model), *options]


SYSTEMS = [
    _ours("float32"),
    _vllm("vllm-float32-compiled"),
    _ours("int8"),
    _llama("Q4_0", is_leading=True),
    _ours("float32", "-no-speculation", "--speculative", "none"),  # what of our figures is not speculation's
    _ours("int8", "-no-speculation", "--speculative", "none"),
    _ours("float32", "-fast", "--numerics", "fast"),  # what its promise costs
    _ours("float32", "-fast-torch", "--numerics", "fast", "--kernels", "torch", is_leading=False),
    _vllm("vllm-float32-eager", "--eager"),
    _llama("Q8_0", is_leading=False),
    _llama("F32", is_leading=False),
    System(
        "transformers-float32",
        "transformers",
        lambda into: _runner(into, "transformers", "run_transformers.py", "hf"),
        is_leading=False,
    ),
]


def checking_command(into: Path, workloads: dict[str, Path], outputs: Path) -> list[str]:
    """Whether float32 outputs are transformers' own, in transformers' environment."""
    named = [f"{name}={file}" for name, file in workloads.items()]
    command = _runner(into, "transformers", "check_transformers.py", "hf")
    return [*command, "--workloads", *named, "--outputs", str(outputs)]
