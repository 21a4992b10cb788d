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


def token_bytes_of(backend: Any, description: dict[str, Any]) -> list[bytes]:
    """Bytes by id. `description` is the parsed tokenizer.json. Raises ModelLoadError for an unknown kind."""
    to_bytes = _reader(description.get("decoder") or {})
    found = [b""] * backend.get_vocab_size(with_added_tokens=True)
    for piece, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < len(found):
            found[token_id] = to_bytes(piece)
    for token_id, token in backend.get_added_tokens_decoder().items():
        if token_id < len(found):
            found[token_id] = token.content.encode()  # added tokens are plain text in every family
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
