"""Settings of the whole tree of processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class UpSettings:
    workers: int = 1  # worker processes
    data_dir: Path | None = None  # embedded server's data, and blobs; None: in the cache folder
    ready_seconds: float = 300.0  # everything must be ready by then; a first start may fetch and convert a model

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers: is {self.workers}; give 1 or more")
