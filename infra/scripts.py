"""The Lua scripts: composed from `lua/`, called by their digest, loaded again where the server has forgotten them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import redis

from infra import endings, losses, states, tiers, work
from infra.connect import Server, Translated
from infra.durability import Durability
from infra.node import Argument, first_error
from infra.settings import QueueSettings
from infra.store import PLACE_LOOKS

LANE_SCRIPTS = (
    "submit", "claim", "renew", "publish", "commit", "release", "cancel", "delete", "sweep", "position", "pause",
    "take_notices", "delay_notice", "delete_notice", "load", "look", "read_logs", "watch", "drop",
)  # fmt: skip
OTHER_SCRIPTS = (
    "open_lane", "add_lane", "close_lane", "reopen_lane", "revive_lane", "forget_lane",
    "claim_key", "index_job", "prune_index", "put_worker", "workers",
)  # fmt: skip
# Work must be able to end when memory is full; only what brings new work is refused then.
_REFUSED_WITHOUT_MEMORY = {"submit", "claim_key"}


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text()


def compose(settings: QueueSettings) -> dict[str, bytes]:
    """The scripts by name, with the tables and constants of Python written into them."""
    retention = {
        "RECORD_MS": settings.record_seconds,
        "EVENT_LOG_MS": settings.event_log_seconds,
        "DEAD_LETTER_MS": settings.dead_letter_seconds,
        "PATIENCE_MS": settings.patience_seconds,
    }
    constants = "".join(f"local {name} = {round(seconds * 1000)}\n" for name, seconds in retention.items())
    constants += f"local PLACE_LOOKS = {PLACE_LOOKS}\n"
    tables = "".join(part.as_lua() for part in (states, tiers, work, losses, endings))
    lane = tables + constants + _source("lane")

    def whole(name: str) -> bytes:
        shebang = "#!lua\n" if name in _REFUSED_WITHOUT_MEMORY else "#!lua flags=allow-oom\n"
        return (shebang + (lane if name in LANE_SCRIPTS else "") + _source(name)).encode()

    return {name: whole(name) for name in (*LANE_SCRIPTS, *OTHER_SCRIPTS)}


@dataclass(frozen=True, slots=True)
class Call:
    """One script's name, keys in one slot, and arguments."""

    name: str
    keys: Sequence[str]
    arguments: Sequence[Argument]

    @property
    def rest(self) -> tuple[Argument, ...]:
        return (len(self.keys), *self.keys, *self.arguments)


class Scripts:
    """Calls scripts on one server."""

    def __init__(self, server: Server, settings: QueueSettings) -> None:
        self._server = server
        self._sources = compose(settings)
        # A script's name on the server is the SHA-1 of its text; nothing is kept secret by it.
        self._digests = {
            name: hashlib.sha1(text, usedforsecurity=False).hexdigest() for name, text in self._sources.items()
        }

    async def load(self) -> None:
        for source in self._sources.values():
            await self._server.everywhere("SCRIPT LOAD", source)

    async def call(
        self,
        name: str,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        *,
        repeat: bool = True,
        kept: tuple[Durability, str] | None = None,
    ) -> Any:
        """What the script answers. With `repeat`, it is called once more where the connection broke.

        With `kept` (how, and a key in the same slot to mark), only after all that the server holds by then is kept.
        Raises StoreUnavailable, or the ResponseError that the script made.
        """
        [answer] = await self.call_all(Call(name, keys, arguments), repeat=repeat, kept=kept)
        return answer

    async def call_all(
        self, *calls: Call, repeat: bool = True, kept: tuple[Durability, str] | None = None
    ) -> list[Any]:
        """What the scripts answer, called in order and in one round trip; otherwise as `call`. No transaction."""
        with Translated():
            try:
                return await self._answers(calls, kept)
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                if not repeat:
                    raise
            return await self._answers(calls, kept)

    async def _answers(self, calls: Sequence[Call], kept: tuple[Durability, str] | None) -> list[Any]:
        try:
            return await self._send([("EVALSHA", self._digests[call.name], *call.rest) for call in calls], kept)
        except redis.exceptions.NoScriptError:  # those that were not forgotten are repeated too
            return await self._send([("EVAL", self._sources[call.name], *call.rest) for call in calls], kept)

    async def _send(self, commands: Sequence[Sequence[Argument]], kept: tuple[Durability, str] | None) -> list[Any]:
        if kept is None or not kept[0].needs_proof:
            if len(commands) == 1:
                return [await self._server.raw(*commands[0])]
            proof: list[tuple[Argument, ...]] = []
        else:
            proof = kept[0].proof(kept[1])
        before: list[Any] = []
        if self._server.is_cluster:  # no one way leads to several slots: one after the other, the last with its proof
            before = [await self._server.raw(*command) for command in commands[:-1]]
            commands = commands[-1:]
        answers = await self._server.raw_batch(*commands, *proof)
        if (error := first_error(answers)) is not None:
            raise error
        if kept is not None and proof:
            kept[0].check(answers[-1])
        return before + answers[: len(commands)]
