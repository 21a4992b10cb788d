"""Where scenarios run: a folder, a server program, and whether the short form is wanted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.chaos.record import Record
from bench.chaos.site import Site, site


@dataclass(frozen=True)
class Yard:
    folder: Path
    binary: Path
    short: bool

    def site(
        self, *directives: str, name: str = "site", environment: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[Site]:
        """`directives` and `environment` are the server's."""
        return site(self.folder / name, self.binary, short=self.short, directives=directives, environment=environment)

    def size(self, short: int, full: int) -> int:
        return short if self.short else full


Scenario = Callable[[Yard], Awaitable[Record]]


class NotHere(Exception):
    """A part that the scenario needs is missing on this machine."""
