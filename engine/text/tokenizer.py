"""A model's tokenizer: text to ids, ids to bytes. Built on `tokenizers`; loads neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelLoadError
from engine.text.chat_template import ChatTemplate
from engine.text.vocabulary import TokenBytes


class _Description(msgspec.Struct):
    """tokenizer.json, of which the library reads all else."""

    decoder: dict[str, Any] | None = None


class Tokenizer:
    """Ids, bytes and special tokens of one model folder.

    Attributes: `vocab_size` (ids are 0 .. vocab_size - 1), `bos_token_id` (None where the model has none),
    `eos_token_ids` (every id that ends an answer), `special_ids` (ids that never show in text),
    `chat_template_source` (Jinja, None where the model has none).
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        try:
            self._data = path.read_bytes()
            self._backend = Backend.from_buffer(self._data)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        self._config = _read_json(folder / "tokenizer_config.json")
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.bos_token_id = self._role_id("bos_token")
        self.eos_token_ids = self._read_eos_ids(folder)
        self.chat_template_source = _read_template(folder, self._config)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens`, what the model expects around it (such as one BOS).

        A rendered chat template already holds its special tokens: encode it with False.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text` without special tokens, and the half-open range of characters that each one touches."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids` as a whole; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(i) for i in token_ids if not (skip_special_tokens and i in self.special_ids))
        text = data.decode("utf-8", errors="replace")
        return text[1:] if self._strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one id stands for; joined over a sequence they are its text. Empty for an unused id."""
        return self._bytes_by_id[token_id] if 0 <= token_id < self.vocab_size else b""

    def to_json(self) -> str:
        """The contents of tokenizer.json: what another process needs to encode as this one does."""
        return self._data.decode()

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own template, or None for a model that has none."""
        if self.chat_template_source is None:
            return None
        return ChatTemplate(self.chat_template_source, self.role_tokens)

    @cached_property
    def role_tokens(self) -> dict[str, str]:
        """The text of the tokens that play a part, by its name; the names are those that templates use."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        return {name: token for name in names if (token := self._role_token(name)) is not None}

    @cached_property
    def _bytes_by_id(self) -> TokenBytes:
        return TokenBytes(self._backend, self._decoder)

    @cached_property
    def _decoder(self) -> dict[str, Any]:
        return msgspec.json.decode(self._data, type=_Description).decoder or {}

    @cached_property
    def _strips_leading_space(self) -> bool:
        """SentencePiece vocabularies write the first word with a space that is not in the text."""
        steps = self._decoder.get("decoders", [self._decoder])
        return any(step.get("type") == "Strip" and step.get("content") == " " for step in steps)

    def _role_token(self, role: str) -> str | None:
        value = self._config.get(role)
        return value["content"] if isinstance(value, dict) else value

    def _role_id(self, role: str) -> int | None:
        token = self._role_token(role)
        if token is None:
            return None
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def _read_eos_ids(self, folder: Path) -> frozenset[int]:
        """generation_config.json knows best (Llama 3 ends turns with several ids); then config.json; then the role."""
        for name in ("generation_config.json", "config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
        token_id = self._role_id("eos_token")
        return frozenset() if token_id is None else frozenset({token_id})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    return value


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    source = config.get("chat_template")
    if isinstance(source, list):  # named templates: `default` is the one for plain chat
        source = {item["name"]: item["template"] for item in source}.get("default")
    return source
