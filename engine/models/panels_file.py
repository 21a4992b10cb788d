"""A model's panels on disk, beside the weights that they were made of: a start maps them instead of packing anew.

Only for models that Millstream has converted into its cache; any other folder is left as it is.

<folder>/<library>-<dtype>.panels     8 bytes: the length of the JSON; the JSON, padded with blanks; then the tensors,
                                      each from a multiple of 64 bytes on

<library> names the native library's instruction set and sources, which decide how panels lie. The JSON says what the
panels were made of: the manifest's digest, and size and time of each file that it speaks of.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.models.packed import PackedWeights, WeightsDtype
from engine.weights.cache import cache_root, read_manifest
from kernels.cpu.library import Form, Library

log = logging.getLogger(__name__)

_LAYOUT = 1  # raise it when `pack` makes other tensors of the same weights
_ALIGNMENT = 64  # a cache line
_ROOM = 4  # times its size must be free on the disk, or it is not kept
_SECONDS_OF_OTHERS = 86400.0  # how long panels of another library, or half a file, are left alone


def source_of(folder: Path) -> dict[str, Any] | None:
    """What panels of this folder are made of, as it is now; None where it is not one that keeps any."""
    manifest = read_manifest(folder)
    if manifest is None or not folder.resolve().is_relative_to(cache_root().resolve()):
        return None
    paths = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    files = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    return {"weights_digest": manifest.weights_digest, "files": files}


class PanelsFile:
    """The panels of one folder for one library and type of products.

    Made before the weights are read: should they change meanwhile, their panels are not kept.
    """

    def __init__(self, folder: Path, source: dict[str, Any], library: Library, dtype: WeightsDtype) -> None:
        """source: of `source_of`."""
        self._folder, self._source, self._variant, self._dtype = folder, source, library.variant.name, dtype
        self._path = folder / f"{library.name}-{dtype}.panels"

    def read(self) -> PackedWeights | None:
        """Mapped from disk; None where there are none of these very weights."""
        if not self._path.is_file():
            return None
        try:
            data = np.memmap(self._path, dtype=np.uint8, mode="c")
            length = int.from_bytes(data[:8].tobytes(), "little")
            head = json.loads(data[8 : 8 + length].tobytes())
            if (head["layout"], head["source"]) != (_LAYOUT, self._source):
                return None
            if head["size"] != len(data):
                raise ValueError(f"it has {len(data)} bytes instead of {head['size']}")
            whole = torch.from_numpy(data)
            tensors = {
                name: whole[start:end].view(getattr(torch, kind)).view(shape)
                for name, (kind, shape, start, end) in head["tensors"].items()
            }
            return PackedWeights(tensors, {name: Form(form) for name, form in head["forms"].items()})
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:  # a torn file
            log.warning("%s cannot be read, so the weights are packed anew: %s", self._path, error)
            return None

    def keep(self, packed: PackedWeights) -> None:
        """For later starts, whole or not at all. Where that cannot be done the log says why."""
        size = sum(_padded(tensor.nbytes) for tensor in packed.tensors.values())
        try:
            self._remove_left()
            if shutil.disk_usage(self._folder).free < _ROOM * size:
                log.info("%s is not kept: the disk has less than %d times its %d bytes free", self._path, _ROOM, size)
            elif source_of(self._folder) == self._source:
                self._write(packed)
        except OSError as error:
            log.info("%s is not kept: %s", self._path, error)

    def _remove_left(self) -> None:
        """What was made long ago for other sources of the library, and what a killed process has left."""
        mine = re.compile(rf"{re.escape(self._variant)}-[0-9a-f]+-{self._dtype}\.panels|\.panels-.*")
        for path in self._folder.iterdir():
            if mine.fullmatch(path.name) and path != self._path:
                with contextlib.suppress(OSError):  # another process does the same
                    if time.time() - path.stat().st_mtime > _SECONDS_OF_OTHERS:
                        path.unlink()

    def _write(self, packed: PackedWeights) -> None:
        tensors = dict(sorted(packed.tensors.items()))  # packed by several threads in any order
        entries: dict[str, list[Any]] = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0, 0]
            for name, tensor in tensors.items()
        }
        head = {
            "layout": _LAYOUT,
            "source": self._source,
            "size": 0,
            "forms": {name: int(form) for name, form in sorted(packed.forms.items())},
            "tensors": entries,
        }
        length = len(json.dumps(head)) + 40 * (len(entries) + 1)  # the zeros become numbers of up to 20 digits
        at = _padded(8 + length)
        for name, tensor in tensors.items():
            entries[name][2:] = [at, at + tensor.nbytes]
            at += _padded(tensor.nbytes)
        head["size"] = at
        handle, name = tempfile.mkstemp(prefix=".panels-", dir=self._folder)
        aside = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(length.to_bytes(8, "little") + json.dumps(head).ljust(length).encode())
                for entry, tensor in zip(entries.values(), tensors.values(), strict=True):
                    file.seek(entry[2])
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                file.truncate(at)
                file.flush()
                os.fsync(file.fileno())  # a crash must not leave a whole name over half of the bytes
            aside.chmod(0o644)
            aside.rename(self._path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
