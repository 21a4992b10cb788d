"""From what is named on the command line to documents: files, JSONL, URIs. A bad one never hurts the others."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

_NOT_TEXT = {
    ".pdf": "PDF is not read yet; convert it first, for example: pdftotext FILE",
    ".html": "HTML is not read yet; convert it first, for example: w3m -dump FILE",
    ".htm": "HTML is not read yet; convert it first, for example: w3m -dump FILE",
}


@dataclass(frozen=True, slots=True)
class Document:
    """One document to summarize: `text` or `uri`, or else `problem`, which says why it cannot be sent."""

    id: str  # unique among its fellows
    name: str
    text: str | None = None
    uri: str | None = None
    problem: str | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a JSONL file of documents."""

    id: str
    text: str | None = None
    uri: str | None = None
    name: str | None = None


def read_documents(names: Sequence[str]) -> list[Document]:
    """The documents behind `names`, in order, their ids made unique."""
    documents: list[Document] = []
    num_seen: dict[str, int] = {}
    for name in names:
        for document in _read(name):
            count = num_seen[document.id] = num_seen.get(document.id, 0) + 1
            documents.append(document if count == 1 else replace(document, id=f"{document.id}#{count}"))
    return documents


def _read(name: str) -> Iterator[Document]:
    if "://" in name:
        readable = name.startswith(("file://", "s3://"))
        problem = None if readable else "only file:// and s3:// addresses are read"
        yield Document(id=name, name=name, uri=name, problem=problem)
        return
    path = Path(name)
    plain_name = name.removesuffix(".gz")
    kind = Path(plain_name).suffix.lower()
    if kind in _NOT_TEXT:
        yield Document(id=name, name=name, problem=_NOT_TEXT[kind])
        return
    try:
        content = path.read_bytes()
        if plain_name != name:
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        yield Document(id=name, name=name, problem=_why(error))
        return
    if kind == ".jsonl":
        yield from _read_lines(name, content)
    else:
        yield _decoded(name, content)


def _decoded(name: str, content: bytes) -> Document:
    encoding = "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return Document(id=name, name=name, text=content.decode(encoding))
    except UnicodeDecodeError as error:
        problem = (
            f"not UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}; "
            "if it is text of another encoding, convert it, for example: iconv -f latin1 -t utf-8 FILE"
        )
        return Document(id=name, name=name, problem=problem)


def _read_lines(name: str, content: bytes) -> Iterator[Document]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            one = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield Document(id=where, name=where, problem=f'{error}; a line is {{"id", "text"}} or {{"id", "uri"}}')
            continue
        if (one.text is None) == (one.uri is None):
            yield Document(id=where, name=where, problem="give a line either a text or a uri")
        else:
            yield Document(id=one.id, name=one.name or one.id, text=one.text, uri=one.uri)


def _why(error: Exception) -> str:
    match error:
        case FileNotFoundError():
            return "there is no such file"
        case IsADirectoryError():
            return "it is a folder; name the files in it"
        case PermissionError():
            return "it may not be read: permission denied"
        case gzip.BadGzipFile() | EOFError() | zlib.error():
            return f"not a whole gzip file: {error}"
        case _:
            return f"it cannot be read: {error}"
