"""How a worker is told to stop: once to drain, twice to hurry."""

from __future__ import annotations

import asyncio
import signal


class Stopping:
    """`told`: stop, finish what fits. `hurry`: hand over now."""

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self.hurry = asyncio.Event()

    def tell(self) -> None:
        (self.hurry if self.told.is_set() else self.told).set()

    def on_signals(self) -> None:
        """Is told by SIGTERM and SIGINT from here on; to be called in the event loop's main thread."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.tell)
