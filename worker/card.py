"""The model card: what a worker tells the gateways of its model. It stays when no worker runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from infra.blobs import Blobs
from infra.contracts import ModelCard
from infra.errors import StoreUnavailable
from infra.store import JobStore
from worker.rates import Rates

if TYPE_CHECKING:
    from engine.config import ModelInfo
    from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

CARD_SECONDS = 5.0  # how often measured rates are looked at


def profile_of(info: ModelInfo) -> str:
    """The numerics profile: workers that share it emit the same tokens for the same request and seed.

    The weights come first (`contracts.weights_of`): jobs are never continued across them.
    """
    device = info.device.partition(":")[0]
    numbers = f"dtype={info.dtype};kv={info.kv_dtype};kernels={info.kernels}"
    return f"weights={info.weights_digest};device={device};{numbers};tp={info.tensor_parallel_size}"


def tokenizer_blob(info: ModelInfo) -> str:
    """Key of the blob that holds the model's tokenizer.json."""
    return f"tokenizers/{info.tokenizer_digest.replace(':', '-')}"


def card_of(
    alias: str,
    info: ModelInfo,
    tokenizer: Tokenizer,
    *,
    created_ms: int,
    cold_start_seconds: float | None = None,
    max_workers: int | None = None,
) -> ModelCard:
    """The card of a loaded model, without rates."""
    return ModelCard(
        alias=alias,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        tokenizer_digest=info.tokenizer_digest,
        tokenizer_blob=tokenizer_blob(info),
        weights_digest=info.weights_digest,
        profile=profile_of(info),
        chat_template=info.chat_template,
        bos_token=tokenizer.role_tokens.get("bos_token"),
        eos_token=tokenizer.role_tokens.get("eos_token"),
        eos_token_ids=list(info.eos_token_ids),
        cold_start_seconds=cold_start_seconds,
        max_workers=max_workers,
        created_ms=created_ms,
    )


async def put_tokenizer(blobs: Blobs, info: ModelInfo, tokenizer: Tokenizer) -> None:
    """Puts tokenizer.json where the card says it is. Raises BlobUnavailable."""
    key = tokenizer_blob(info)
    if not await asyncio.to_thread(blobs.exists, key):
        await asyncio.to_thread(blobs.put, key, tokenizer.to_json().encode())


class CardKeeper:
    """Puts the card, and puts it again when the measured rates have moved."""

    def __init__(self, store: JobStore, card: ModelCard, rates: Callable[[], Rates]) -> None:
        """`rates` says what is measured now."""
        self._store = store
        self._card = card
        self._rates = rates

    async def put(self) -> None:
        """The first time: rates that an earlier worker of the same profile measured are kept until ours are there.

        Raises StoreUnavailable.
        """
        before = (await self._store.cards()).get(self._card.alias)
        if before is not None and before.profile == self._card.profile:
            self._write(Rates.of_card(before))
        await self._store.put_card(self._card)

    async def refresh(self) -> None:
        """Looks every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(CARD_SECONDS)
            told = Rates.of_card(self._card)
            rates = self._rates().over(told)
            if not rates.differ_from(told):
                continue
            self._write(rates)
            try:
                await self._store.put_card(self._card)
            except StoreUnavailable as error:
                self._write(told)  # the next look tells it
                log.warning("the model card was not written: %s", error)

    def _write(self, rates: Rates) -> None:
        self._card = msgspec.structs.replace(
            self._card,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_tokens_per_s=rates.decode_tokens_per_s,
            pace=rates.pace,
        )
