"""Blobs in a folder of this machine, or of a file system that machines share."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from infra.blobs import BlobEntry, checked_key
from infra.errors import BlobUnavailable, UnknownBlob


class FolderBlobs:
    """Blobs as files. Written aside, synced, then renamed: a reader sees a whole blob or none."""

    def __init__(self, folder: Path) -> None:
        with _translated(str(folder)):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._root = folder.resolve()

    def put(self, key: str, data: bytes) -> None:
        self.put_stream(key, (data,))

    def put_stream(self, key: str, chunks: Iterable[bytes]) -> int:
        path = self._path(key)
        aside = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            num_bytes = 0
            with _translated(key):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                file = os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
            with file:
                for chunk in chunks:  # what the chunks raise is their own and passes through
                    with _translated(key):
                        num_bytes += file.write(chunk)
                with _translated(key):
                    file.flush()
                    os.fsync(file.fileno())
            with _translated(key):
                aside.replace(path)
                _sync_folder(path.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        return num_bytes

    def get(self, key: str) -> bytes:
        with self.open_read(key) as file, _translated(key):
            return file.read()

    def open_read(self, key: str) -> BinaryIO:
        path = self._path(key)
        with _translated(key):
            return path.open("rb")

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def delete(self, key: str) -> None:
        with _translated(key):
            self._path(key).unlink(missing_ok=True)

    def list(self, prefix: str = "") -> Iterator[BlobEntry]:
        found = (
            path.relative_to(self._root).as_posix()
            for path in self._root.rglob("*")
            if not path.name.startswith(".") and path.is_file()
        )
        for key in sorted(key for key in found if key.startswith(prefix)):
            try:
                about = (self._root / key).stat()
            except FileNotFoundError:
                continue  # deleted meanwhile
            yield BlobEntry(key, about.st_size, about.st_mtime)

    def _path(self, key: str) -> Path:
        path = self._root / checked_key(key)
        if not path.resolve().is_relative_to(self._root):
            raise ValueError(f"{key!r} leads out of the blob folder by a link")
        return path


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Turns the operating system's errors into ours."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise UnknownBlob(f"no blob {key!r}") from error
    except OSError as error:
        raise BlobUnavailable(f"blob {key!r}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    """Makes a rename survive a power loss."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
