"""Brings a step's small arrays to the device with one copy, without making the host wait.

    arrays      [ token_ids | positions | slots | ... ]     one after another, each at a multiple of 16 bytes
    host        as many pinned buffers as uploads may be under way; one is written again only after its copy ended
    device      one buffer, always the same addresses: a captured graph reads its inputs from there

The device's buffer is written in the order of the stream, so what an earlier step still reads is not disturbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.cuda.device import Device, Event, Stream

Arrays = Mapping[str, npt.NDArray[Any]]

_ALIGNMENT = 16  # bytes; Triton's kernels read aligned pointers faster
_DEPTH = 2


class Staging:
    def __init__(self, device: Device, num_bytes: int, stream: Stream | None = None) -> None:
        """`num_bytes`: of the largest upload, padding included (`num_bytes_of`). `stream`: the main one if None."""
        self.num_bytes = num_bytes
        self._stream = stream or device.main
        self._device_buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self._host = [device.pinned(num_bytes) for _ in range(_DEPTH)]
        self._copied: list[Event | None] = [None] * _DEPTH
        self._turn = 0

    def upload(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The arrays on the device, until the next upload: in place as soon as the stream gets there.

        Raises ValueError where they are too many bytes.
        """
        places = _places(arrays)
        end = num_bytes_of(arrays)
        if end > self.num_bytes:
            raise ValueError(f"{end} bytes do not fit into a staging buffer of {self.num_bytes}")
        turn, self._turn = self._turn, (self._turn + 1) % _DEPTH
        copied = self._copied[turn]
        if copied is not None:
            copied.wait()
        host = self._host[turn]
        packed = host.numpy()
        for name, array in arrays.items():
            packed[places[name] : places[name] + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._stream.run(lambda: self._device_buffer[:end].copy_(host[:end], non_blocking=True))
        self._copied[turn] = self._stream.record()
        return self.views(arrays)

    def views(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Where arrays of these shapes lie on the device once they are uploaded together."""
        places = _places(arrays)
        return {
            name: self._device_buffer[places[name] : places[name] + array.nbytes]
            .view(_torch_dtype(array))
            .view(array.shape)
            for name, array in arrays.items()
        }


def num_bytes_of(arrays: Arrays) -> int:
    return sum(_padded(array.nbytes) for array in arrays.values())


def _places(arrays: Arrays) -> dict[str, int]:
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += _padded(array.nbytes)
    return places


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _torch_dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
