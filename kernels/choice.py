"""What a dispatch answers: the implementation to call, its name, and the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Implementation = TypeVar("Implementation")


@dataclass(frozen=True, slots=True)
class Choice(Generic[Implementation]):
    name: str  # "reference", "torch", later "native" and "triton"
    reason: str
    run: Implementation


def the_only_path(run: Implementation, device_type: str, name: str = "reference") -> Choice[Implementation]:
    """For an op that has no path of its own for this kind of device yet."""
    return Choice(name, f"{name}: no {_FASTER.get(device_type, 'faster')} path for {device_type} yet", run)


_FASTER = {"cpu": "native", "cuda": "Triton"}
