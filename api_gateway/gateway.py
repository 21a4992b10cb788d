"""The parts of a gateway, put together once. Routes take it from the application's state."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from api_gateway.admission import Admission
from api_gateway.auth import Keyring
from api_gateway.cards import Cards
from api_gateway.event_hub import EventHub
from api_gateway.foreground import Foreground
from api_gateway.intake import Intake
from api_gateway.job_book import JobBook
from api_gateway.metrics import Metrics
from api_gateway.outlook import Outlook
from api_gateway.tasks import end
from api_gateway.token_counter import TokenCounter
from infra.blobs import Blobs
from infra.errors import MillstreamError
from infra.runs import RunStore
from infra.settings import GatewaySettings
from infra.store import JobStore
from infra.sweeper import Sweeper
from infra.telemetry import Telemetry

log = logging.getLogger("millstream.gateway")


@dataclass(slots=True)
class Gateway:
    settings: GatewaySettings
    store: JobStore
    blobs: Blobs
    runs: RunStore | None
    keyring: Keyring
    cards: Cards
    outlook: Outlook
    hub: EventHub
    book: JobBook
    admission: Admission
    intake: Intake
    foreground: Foreground
    metrics: Metrics
    telemetry: Telemetry
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        store: JobStore,
        blobs: Blobs,
        settings: GatewaySettings,
        *,
        runs: RunStore | None = None,
        telemetry: Telemetry | None = None,
    ) -> Gateway:
        telemetry = telemetry or Telemetry()
        keyring = Keyring.from_settings(settings.api_keys, settings.cache_secret)
        cards = Cards(store)
        hub = EventHub(store, page=settings.event_page)
        outlook = Outlook(store, cards, runs)
        book = JobBook(store, blobs, outlook, hub)
        return cls(
            settings=settings,
            store=store,
            blobs=blobs,
            runs=runs,
            keyring=keyring,
            cards=cards,
            outlook=outlook,
            hub=hub,
            book=book,
            admission=Admission(cards, outlook, TokenCounter(blobs), keyring, settings.default_max_tokens),
            intake=Intake(store, blobs, cards, outlook, telemetry, settings.max_queue_length),
            foreground=Foreground(book, hub, settings.keepalive_seconds, settings.watch_seconds),
            metrics=Metrics(),
            telemetry=telemetry,
        )

    async def start(self) -> None:
        self.hub.start()
        self._tasks = [
            asyncio.create_task(self._sweep(), name="sweeper"),
            asyncio.create_task(self.foreground.keep_watch(), name="watcher"),
        ]

    @property
    def is_closing(self) -> bool:
        return self.hub.is_closing_streams

    def begin_closing(self) -> None:
        """Streams end at once and can be resumed elsewhere; whoever waits for a whole answer has a while longer."""
        self.hub.close_streams()

    async def close(self) -> None:
        await end(*self._tasks)
        await self.hub.close()
        await self.foreground.let_go()

    async def _sweep(self) -> None:
        """Ends what is past its time, also where no worker and no dispatcher runs. Any number may do it at once."""
        sweeper = Sweeper(self.store)
        while True:
            await asyncio.sleep(self.settings.sweep_seconds)
            try:
                await sweeper.sweep()
                await self.store.drop_drained()
            except MillstreamError as error:
                log.warning("sweep: %s; trying again in %g s", error, self.settings.sweep_seconds)
            except Exception:
                log.exception("sweep: going on after an unexpected error")
