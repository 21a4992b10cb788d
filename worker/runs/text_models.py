"""A model as the steps of runs know it: its tokens and its chat template, from its card. No weights."""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from engine.text.chat_template import ChatTemplate
from engine.text.splitter import split_document
from engine.text.tokenizer import Tokenizer
from infra.blobs import Blobs
from infra.contracts import JobSpec, Kind, Message, ModelCard
from infra.runs import Chunk

MAX_MODELS = 8


@dataclass(frozen=True, slots=True)
class TextModel:
    alias: str
    context_tokens: int
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def spec(self, prompt: str) -> JobSpec:
        """The job that asks the model this: as a chat where it has a template, else as plain text."""
        if self.template is None:
            return JobSpec(model=self.alias, kind=Kind.GENERATE, prompt=f"{prompt}\n\nSummary:\n")
        return JobSpec(model=self.alias, kind=Kind.CHAT, messages=[Message(role="user", content=prompt)])

    def count(self, spec: JobSpec) -> int:
        """Tokens of the spec's prompt as the worker will see it."""
        if self.template is None or spec.messages is None:
            return len(self.tokenizer.encode(spec.prompt or ""))
        text = self.template.render([{"role": one.role, "content": one.content} for one in spec.messages])
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def chunks(self, text: str, *, chunk_tokens: int, overlap_tokens: int) -> list[Chunk]:
        """The document in chunks that cover it."""
        return [
            Chunk(start=one.start_byte, end=one.end_byte, own_start=one.fresh_byte, num_tokens=one.num_tokens)
            for one in split_document(text, self.tokenizer, chunk_tokens, overlap_tokens)
        ]


class TextModels:
    """Models by card, loaded once for each tokenizer and template."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._models: OrderedDict[tuple[str, str, str | None, int], TextModel] = OrderedDict()
        self._lock = asyncio.Lock()

    async def of(self, card: ModelCard) -> TextModel:
        """Raises BlobUnavailable, UnknownBlob or ModelLoadError where the card's tokenizer cannot be had."""
        key = (card.alias, card.tokenizer_digest, card.chat_template, card.max_model_len)
        async with self._lock:
            if key not in self._models:
                self._models[key] = await asyncio.to_thread(self._load, card)
                while len(self._models) > MAX_MODELS:
                    self._models.popitem(last=False)
            self._models.move_to_end(key)
            return self._models[key]

    def _load(self, card: ModelCard) -> TextModel:
        with tempfile.TemporaryDirectory(prefix="millstream-tokenizer-") as folder:
            (Path(folder) / "tokenizer.json").write_bytes(self._blobs.get(card.tokenizer_blob))
            tokenizer = Tokenizer(Path(folder))
        roles = {"bos_token": card.bos_token, "eos_token": card.eos_token}
        tokens = {name: token for name, token in roles.items() if token is not None}
        template = None if card.chat_template is None else ChatTemplate(card.chat_template, tokens)
        return TextModel(card.alias, card.max_model_len, tokenizer, template)
