"""Counts a prompt's tokens as the model would, where counting its bytes does not settle whether it fits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from api_gateway.errors import CardUnusable
from engine.errors import ModelLoadError
from engine.text.chat_template import ChatTemplate
from infra.blobs import Blobs, BlobUnavailable
from infra.contracts import Message, ModelCard

MAX_TOKENIZERS = 8
MAX_COUNTS_AT_ONCE = 2  # each keeps a thread, and nearly a core, busy
SMALL_CHARACTERS = 16_384  # text that is rendered or counted at once, not in a thread


@dataclass(slots=True)
class TokenCounter:
    """Tokenizers and chat templates of the cards, loaded once for each digest."""

    blobs: Blobs
    _tokenizers: OrderedDict[str, Any] = field(default_factory=OrderedDict)
    _templates: OrderedDict[tuple[str, str | None, str | None], ChatTemplate] = field(default_factory=OrderedDict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_COUNTS_AT_ONCE))

    async def count(self, card: ModelCard, text: str, *, add_special_tokens: bool) -> int:
        """Tokens of `text`, with those that the model expects around a plain prompt where asked."""
        tokenizer = await self._tokenizer(card)
        async with self._slots:
            encodings = await asyncio.to_thread(  # a batch lets others run meanwhile; a single text does not
                tokenizer.encode_batch_fast, [text], add_special_tokens=add_special_tokens
            )
        return len(encodings[0])

    async def render(self, card: ModelCard, messages: list[Message]) -> str:
        """The prompt that the model's template makes of `messages`. Raises InvalidRequest where it refuses them."""
        template = self._template(card)
        plain = [msgspec.to_builtins(one) for one in messages]
        if sum(len(one.content) for one in messages) <= SMALL_CHARACTERS:
            return template.render(plain)
        return await asyncio.to_thread(template.render, plain)

    def _template(self, card: ModelCard) -> ChatTemplate:
        assert card.chat_template is not None, "admission has checked it"
        key = (card.chat_template, card.bos_token, card.eos_token)
        if key not in self._templates:
            tokens = {"bos_token": card.bos_token, "eos_token": card.eos_token}
            named = {name: token for name, token in tokens.items() if token is not None}
            try:
                self._templates[key] = ChatTemplate(card.chat_template, named)
            except ModelLoadError as error:
                raise CardUnusable(f"model {card.alias}: {error}") from error
            _forget_oldest(self._templates)
        return self._templates[key]

    async def _tokenizer(self, card: ModelCard) -> Any:
        async with self._lock:
            if card.tokenizer_digest not in self._tokenizers:
                self._tokenizers[card.tokenizer_digest] = await asyncio.to_thread(self._load, card)
                _forget_oldest(self._tokenizers)
            return self._tokenizers[card.tokenizer_digest]

    def _load(self, card: ModelCard) -> Any:
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_str(self.blobs.get(card.tokenizer_blob).decode())
        except BlobUnavailable:
            raise
        except Exception as error:  # the library raises bare Exception for a malformed description
            raise CardUnusable(f"model {card.alias}: its tokenizer cannot be read: {error}") from error


def _forget_oldest(kept: OrderedDict[Any, Any]) -> None:
    while len(kept) > MAX_TOKENIZERS:
        kept.popitem(last=False)
