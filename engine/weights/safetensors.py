"""Weights of a model folder by name, mapped from disk: one file or shards behind an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelLoadError

if TYPE_CHECKING:
    import torch


class Checkpoint:
    """Reads tensors by name. Each file is mapped at its first use, so only touched pages are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._homes = self._read_homes()

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    @property
    def names(self) -> list[str]:
        return sorted(self._homes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored. Raises ModelLoadError where the model has none of this name."""
        file = self._homes.get(name)
        if file is None:
            raise ModelLoadError(f"{self.folder} lacks the tensor {name}")
        tensor: torch.Tensor = self._file(file).get_tensor(name)
        return tensor

    def _read_homes(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            homes: dict[str, str] = json.loads(index.read_text())["weight_map"]
            missing = sorted({file for file in homes.values() if not (self.folder / file).is_file()})
            if missing:
                raise ModelLoadError(f"{self.folder} lacks the shards {', '.join(missing)} that its index names")
            return homes
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(f"{self.folder} has no *.safetensors")
        return {name: file for file in files for name in self._file(file).keys()}  # noqa: SIM118 (not a dict)

    def _file(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{self.folder / file} cannot be read: {error}") from error
        return self._open[file]
