"""What a compiled kernel asks of a GPU, read from the binary itself.

cubin    `cuobjdump --dump-resource-usage`: registers, stack (what spills or arrays without registers take), static
         shared memory
hsaco    an ELF file whose note NT_AMDGPU_METADATA is a MessagePack map with the kernel's descriptor

Triton asks for its dynamic shared memory at launch; only its metadata tells how much.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec


@dataclass(frozen=True, slots=True)
class Resources:
    registers: int  # per thread
    spilled_bytes: int  # per thread, of local memory
    shared_bytes: int  # per program


class UnreadableBinary(Exception):
    """The binary lacks the section that names a kernel's resources. Was it compiled for another target?"""


_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)")


def read_cubin(binary: bytes, dynamic_shared_bytes: int, cuobjdump: Path) -> Resources:
    """Raises UnreadableBinary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _USAGE.search(done.stdout)
    if found is None:
        raise UnreadableBinary(f"cuobjdump says: {done.stdout}{done.stderr}")
    return Resources(
        registers=int(found["registers"]),
        spilled_bytes=int(found["stack"]) + int(found["local"]),
        shared_bytes=int(found["shared"]) + dynamic_shared_bytes,
    )


_SECTION_HEADERS_AT, _SECTION_HEADER_LEN, _NUM_SECTIONS_AT = 0x28, 64, 0x3C
_NOTE_SECTION = 7
_METADATA_NOTE = 32
_BYTES_PER_SPILL = 4


def read_hsaco(binary: bytes, dynamic_shared_bytes: int) -> Resources:
    """Raises UnreadableBinary."""
    for kind, text in _notes(binary):
        if kind == _METADATA_NOTE:
            (kernel,) = msgspec.msgpack.decode(text)["amdhsa.kernels"]
            num_spills = kernel[".vgpr_spill_count"] + kernel[".sgpr_spill_count"]
            return Resources(
                registers=kernel[".vgpr_count"],  # accumulation registers included: one file on this generation
                spilled_bytes=max(num_spills * _BYTES_PER_SPILL, kernel[".private_segment_fixed_size"]),
                shared_bytes=kernel[".group_segment_fixed_size"] + dynamic_shared_bytes,
            )
    raise UnreadableBinary


def _notes(elf: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, description) of every note of a 64-bit little-endian ELF file."""
    (headers_at,) = struct.unpack_from("<Q", elf, _SECTION_HEADERS_AT)
    (num_sections,) = struct.unpack_from("<H", elf, _NUM_SECTIONS_AT)
    for section in range(num_sections):
        header = headers_at + section * _SECTION_HEADER_LEN
        (kind,) = struct.unpack_from("<I", elf, header + 4)
        place, size = struct.unpack_from("<QQ", elf, header + 24)
        end = place + size
        while kind == _NOTE_SECTION and place < end:
            name_len, text_len, note_kind = struct.unpack_from("<III", elf, place)
            text_at = place + 12 + _padded(name_len)
            yield note_kind, elf[text_at : text_at + text_len]
            place = text_at + _padded(text_len)


def _padded(length: int) -> int:
    return (length + 3) // 4 * 4
