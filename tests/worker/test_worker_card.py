import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine import LLM
from infra.blob_folder import FolderBlobs
from infra.memory import MemoryJobs
from tests.worker.worker_aids import ENGINE, SETTINGS, Backend, Faults, FaultyStore, serving, submit, the_end, until
from worker import card as cards
from worker.card import CardKeeper, card_of, profile_of, put_tokenizer
from worker.rates import Rates


def test_rates_are_told_once_measured_and_when_they_move() -> None:
    none, some = Rates(), Rates(100.0, 10.0)
    assert not none.differ_from(none)
    assert some.differ_from(none)
    assert not none.over(some).differ_from(some)
    assert not Rates(104.0, 10.4).differ_from(some)
    assert Rates(100.0, 11.0).differ_from(some)
    assert Rates(90.0, 10.0).differ_from(some)
    assert Rates(None, 12.0).over(some) == Rates(100.0, 12.0)


async def test_the_card_says_what_a_gateway_needs(tmp_path: Path) -> None:
    llm, store, blobs = LLM("fake", ENGINE), MemoryJobs(), FolderBlobs(tmp_path)
    card = card_of("public", llm.info, llm.tokenizer, created_ms=5)
    await put_tokenizer(blobs, llm.info, llm.tokenizer)
    await CardKeeper(store, card, Rates).put()
    (kept,) = (await store.cards()).values()
    assert (kept.alias, kept.vocab_size, kept.max_model_len) == ("public", 260, 8192)
    assert (kept.eos_token, kept.eos_token_ids, kept.bos_token) == ("<|end|>", [256], None)
    assert kept.chat_template is not None
    assert kept.profile == profile_of(llm.info) == "weights=fake-1;device=none;dtype=none;kv=none;kernels=fake-1;tp=1"
    encoded = Tokenizer.from_str(blobs.get(kept.tokenizer_blob).decode()).encode("<|user|>hé")
    assert encoded.ids == llm.tokenizer.encode("<|user|>hé") == [257, 104, 195, 169]


async def test_rates_outlive_workers_of_the_same_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "CARD_SECONDS", 0.01)
    llm, store, faults = LLM("fake", ENGINE), MemoryJobs(), Faults()
    card = card_of("fake", llm.info, llm.tokenizer, created_ms=5)
    measured = Rates()
    keeper = CardKeeper(FaultyStore(store, faults), card, lambda: measured)  # type: ignore[arg-type]
    await keeper.put()
    refreshing = asyncio.ensure_future(keeper.refresh())
    faults.lose_calls["put_card"] = 2
    measured = Rates(100.0, 10.0)
    await until(lambda: faults.calls["put_card"] == 4)
    measured = Rates(101.0, 10.0)
    await asyncio.sleep(0.05)
    assert faults.calls["put_card"] == 4
    refreshing.cancel()
    await CardKeeper(store, card, Rates).put()
    (kept,) = (await store.cards()).values()
    assert Rates.of_card(kept) == Rates(100.0, 10.0)
    other = card_of("fake", llm.info, llm.tokenizer, created_ms=9)
    other.profile = "weights=other"
    await CardKeeper(store, other, Rates).put()
    (kept,) = (await store.cards()).values()
    assert Rates.of_card(kept) == Rates()


async def test_a_worker_measures_and_tells(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "CARD_SECONDS", 0.01)
    async with serving(backend):
        await the_end(backend.store, await submit(backend.store, "How fast?", max_tokens=20))
        async with asyncio.timeout(20):
            while (card := (await backend.store.cards())["fake"]).decode_tokens_per_s is None:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    assert card.prefill_tokens_per_s is not None
    assert card.decode_tokens_per_s > 0
    assert SETTINGS.alias is None
