"""The bytes behind every id of a vocabulary.

Two families write bytes as text. Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) draws each byte as one printable
character. SentencePiece (Llama 2, Mistral, Gemma) writes a space as "▁" and a lone byte as "<0x0A>".
Any other kind is refused, since its text could not be joined from its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.errors import ModelLoadError

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"


class TokenBytes(dict[int, bytes]):
    """Bytes by id, each found when it is first asked for: a whole vocabulary at once would delay a start.

    An unused id has none. `decoder` is that part of tokenizer.json. Raises ModelLoadError for an unknown kind.
    """

    def __init__(self, backend: Any, decoder: dict[str, Any]) -> None:
        added = backend.get_added_tokens_decoder().items()
        super().__init__((token_id, token.content.encode()) for token_id, token in added)  # plain text in every family
        self._backend = backend
        self._read = _reader(decoder)

    def __missing__(self, token_id: int) -> bytes:
        piece = self._backend.id_to_token(token_id)
        found = self[token_id] = b"" if piece is None else self._read(piece)
        return found


def printable_bytes() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is moved up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(moved)})
    return alphabet


def _reader(decoder: dict[str, Any]) -> Callable[[str], bytes]:
    kinds = {step.get("type") for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        alphabet = printable_bytes()

        def byte_level(piece: str) -> bytes:
            drawn = [alphabet.get(character) for character in piece]
            return piece.encode() if None in drawn else bytes(byte for byte in drawn if byte is not None)

        return byte_level
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece_bytes
    known = ", ".join(sorted(str(kind) for kind in kinds))
    raise ModelLoadError(f"tokenizer decoder {known} is not supported (byte-level BPE and SentencePiece are)")


def _sentencepiece_bytes(piece: str) -> bytes:
    lone = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(lone[1], 16)]) if lone else piece.replace(_SPACE_MARK, " ").encode()
