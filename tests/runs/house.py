"""One deployment without gateway: a store, blobs, a scripted worker, and processes that a test starts and kills."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.blobs import Blobs, open_blobs
from infra.connect import Server
from infra.jobs import RedisJobs
from infra.runs import NewRun, RunView
from infra.runs.redis import CLOCK, RedisRuns
from infra.settings import DispatcherSettings, PipelineSettings, StoreSettings
from tests.runs.run_aids import ScriptedWorker, serve_model
from tests.webhooks.webhook_aids import eventually, quick
from worker.runs.app import VISIBILITY_SECONDS

PROGRAMS = {
    "dispatcher": "from worker.dispatcher import run; settings = DispatcherSettings",
    "pipelines": "from worker.runs.pipelines import run; settings = PipelineSettings",
}


@dataclass
class House:
    url: str
    folder: Path
    store: RedisJobs
    runs: RedisRuns
    blobs: Blobs
    worker: ScriptedWorker

    @asynccontextmanager
    async def process(
        self, name: str, settings: DispatcherSettings | PipelineSettings, *, before: str = "pass"
    ) -> AsyncIterator[Process]:
        """`before`: Python that the process runs first."""
        code = (
            f"import json, sys; from pathlib import Path; from infra.settings import *; {before}; {PROGRAMS[name]}; "
            "url, folder, fields = sys.argv[1:]; "
            "sys.exit(run(StoreSettings(redis_url=url, cache_dir=Path(folder)), settings(**json.loads(fields))))"
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-c", code, self.url, str(self.folder), json.dumps(asdict(settings)),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == f"{name} ready\n".encode()
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    def dispatcher(self) -> AbstractAsyncContextManager[Process]:
        return self.process("dispatcher", quick(sweep_seconds=0.5))

    def pipelines(self, *, visibility_seconds: int = VISIBILITY_SECONDS) -> AbstractAsyncContextManager[Process]:
        before = f"from worker.runs import app; app.VISIBILITY_SECONDS = {visibility_seconds}"
        return self.process("pipelines", PipelineSettings(run_window=4), before=before)

    async def end_of(self, run: NewRun) -> RunView:
        async def has_ended() -> bool:
            header = await self.runs.header(run.id)
            return header is not None and header.is_finished

        await eventually(has_ended, timeout=60)
        view = await self.runs.get(run.id)
        assert view is not None
        return view

    async def rests(self) -> None:
        """Waits until no run is in the clock and no notice in an outbox."""
        server = Server(self.url)

        async def is_idle() -> bool:
            notices = sum([await server.command("ZCARD", f"ms:{{{lane}}}:outbox") for lane in await self.store.lanes()])
            return not notices and not await server.command("ZCARD", CLOCK)

        await eventually(is_idle)
        await server.close()


@asynccontextmanager
async def housed(redis_url: str, folder: Path) -> AsyncIterator[House]:
    """The model `tiny` has a card; no process runs yet."""
    store = await RedisJobs.connect(redis_url)
    runs = RedisRuns.open(redis_url)
    blobs = open_blobs(StoreSettings(cache_dir=folder).blobs)
    await serve_model(store, blobs, folder)
    yield House(redis_url, folder, store, runs, blobs, ScriptedWorker(store))
    await store.close()
    await runs.close()
