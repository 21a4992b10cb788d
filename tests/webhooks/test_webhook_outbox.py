"""The courier: one try counted, signed, traced, and written down."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from infra.errors import StoreUnavailable
from infra.telemetry import Telemetry
from tests.webhooks.listener import Listener, status
from tests.webhooks.webhook_aids import SECRET
from worker.webhooks.delivery import Sender
from worker.webhooks.event import Message
from worker.webhooks.ledger import Fate, Ledger
from worker.webhooks.outbox import Courier, Done, Later
from worker.webhooks.slots import Slots
from worker.webhooks.ssrf import Allowed

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def ledger(redis_url: str) -> AsyncIterator[Ledger]:
    ledger = Ledger.open(redis_url)
    yield ledger
    await ledger.close()


@pytest.fixture
async def sender() -> AsyncIterator[Sender]:
    sender = Sender(allowed=Allowed.parse("127.0.0.1"), timeout_seconds=5, concurrency=4)
    yield sender
    await sender.close()


def courier(sender: Sender, ledger: Ledger, telemetry: Telemetry | None = None, slots: Slots | None = None) -> Courier:
    return Courier(sender, ledger, slots or Slots(4), secrets=[SECRET], schedule=[0.0, 60.0], wait_seconds=0.05,
                   telemetry=telemetry or Telemetry())  # fmt: skip


def message(url: str, traceparent: str | None = None) -> Message:
    return Message("evt_1", url, "job.succeeded", b"{}", traceparent)


async def test_tries_are_spans_of_the_jobs_trace(ledger: Ledger, sender: Sender) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.start("dispatcher", exporter=exporter)
    async with Listener(status(503), status(200)) as listener:
        told = [await courier(sender, ledger, telemetry).tell(message(listener.url, PARENT)) for _ in range(2)]
    telemetry.close()
    assert isinstance(told[0], Later) and told[1] == Done("delivered")
    first, second = exporter.get_finished_spans()
    assert first.name == "deliver job.succeeded"
    for span, received in zip((first, second), listener.received, strict=True):
        context = span.get_span_context()
        assert context is not None and f"{context.trace_id:032x}" in PARENT
        assert received.headers["traceparent"] == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    assert first.attributes is not None and first.attributes["http.response.status_code"] == 503
    assert not first.status.is_ok and second.attributes is not None and second.attributes["millstream.webhook.try"] == 2


async def test_without_telemetry_the_jobs_context_is_handed_on(ledger: Ledger, sender: Sender) -> None:
    async with Listener() as listener:
        await courier(sender, ledger).tell(message(listener.url, PARENT))
    assert listener.received[0].headers["traceparent"] == PARENT


async def test_what_has_ended_is_not_told_again(ledger: Ledger, sender: Sender) -> None:
    async with Listener() as listener:
        assert await courier(sender, ledger).tell(message(listener.url)) == Done("delivered")
        assert await courier(sender, ledger).tell(message(listener.url)) == Done("known")
        assert listener.num_connections == 1


async def test_a_store_that_is_gone_sends_nothing_and_keeps_no_slot(sender: Sender) -> None:
    gone, slots = Ledger.open("redis://127.0.0.1:1/0"), Slots(4)
    async with Listener() as listener:
        with pytest.raises(StoreUnavailable):
            await courier(sender, gone, slots=slots).tell(message(listener.url))
        assert (listener.num_connections, slots.num_under_way) == (0, 0)
    await gone.close()


async def test_an_endpoint_without_a_slot_is_told_later_and_no_try_is_counted(ledger: Ledger, sender: Sender) -> None:
    slots = Slots(4)
    async with Listener() as listener:
        assert slots.try_take(f"http://127.0.0.1:{listener.port}")
        assert await courier(sender, ledger, slots=slots).tell(message(listener.url)) == Later(1.0)
        assert listener.num_connections == 0
    assert await ledger.begin_try(message("x")) == (1, Fate.OPEN)


async def test_an_entry_tells_what_became_of_a_webhook(ledger: Ledger, sender: Sender) -> None:
    async with Listener(status(404)) as listener:
        for _ in range(2):
            await courier(sender, ledger).tell(message(listener.url))
        entry = await ledger.entry("evt_1")
        assert entry is not None
        assert (entry.num_tries, entry.fate, entry.url, entry.body) == (2, Fate.DEAD, listener.url, b"{}")
    assert await ledger.entry("evt_unknown") is None
    assert await ledger.dead_letters(limit=5) == ["evt_1"]
