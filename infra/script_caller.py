"""Calls scripts that are not of a lane: those of runs, of the webhooks' ledger, of the workers' doorbell."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from infra.connect import Server, Translated
from infra.node import Argument


class ScriptCaller:
    """Calls scripts by their digest; a server that has forgotten one is given its text again."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def call(self, script: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        # A script's name on the server is the SHA-1 of its text; nothing is kept secret by it.
        digest = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        with Translated():
            try:
                return await self._server.raw("EVALSHA", digest, len(keys), *keys, *arguments)
            except NoScriptError:
                return await self._server.raw("EVAL", script, len(keys), *keys, *arguments)
