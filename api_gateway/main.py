"""The gateway process: HTTP in front of the store, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import uvicorn
import uvloop

from api_gateway.app import create_app
from api_gateway.auth import Keyring, is_loopback
from api_gateway.gateway import Gateway
from api_gateway.writes import GatheredProtocol
from infra.blobs import open_blobs
from infra.connect import Server
from infra.errors import MillstreamError
from infra.jobs import RedisJobs
from infra.runs.redis import RedisRuns
from infra.settings import GatewaySettings, QueueSettings, StoreSettings
from infra.telemetry import Telemetry

log = logging.getLogger("millstream.gateway")

BACKLOG = 2048
IDLE_CONNECTION_SECONDS = 75  # longer than common proxies keep theirs, so that they close first
WAITING_SHARE = 0.8  # of the time for a shutdown is for clients that wait for a whole answer


class BadSettings(MillstreamError):
    """The gateway cannot serve as it is configured."""


def run(store_settings: StoreSettings, settings: GatewaySettings, *, queue: QueueSettings | None = None) -> int:
    """Serves until SIGTERM or SIGINT. Exit code: 0 after a clean stop, 1 where it could not start."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # its own start and stop say nothing that we do not
    try:
        check(settings)
        raise_file_limit()
        uvloop.run(_serve(store_settings, settings, queue))
    except MillstreamError as error:
        print(f"millstream gateway: {error.message}", file=sys.stderr)
        return 1
    return 0


def check(settings: GatewaySettings) -> None:
    """Raises BadSettings. Without keys anyone who reaches the port is served, so only this machine may reach it."""
    if not Keyring.from_settings(settings.api_keys, "").is_empty:
        return
    if not is_loopback(settings.host):
        raise BadSettings(
            f"host {settings.host} would serve other machines without any API key; set MILLSTREAM_API_KEYS, "
            "or serve 127.0.0.1"
        )
    log.warning("no API key is configured: only this machine is served (set MILLSTREAM_API_KEYS to serve others)")


def raise_file_limit() -> None:
    """Every connection is an open file, and the usual soft limit of 1,024 is far below what one gateway can hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(store_settings: StoreSettings, settings: GatewaySettings, queue: QueueSettings | None) -> None:
    url = store_settings.server_url
    blobs = open_blobs(store_settings.blobs)
    async with contextlib.AsyncExitStack() as stack:
        store = await RedisJobs.connect(url, settings=queue, kept=store_settings)
        stack.push_async_callback(store.close)
        runs = RedisRuns(Server(url))
        stack.push_async_callback(runs.close)
        telemetry = Telemetry.start("gateway")
        stack.callback(telemetry.close)
        app = create_app(store, blobs, settings, runs=runs, telemetry=telemetry)
        with listening(settings.host, settings.port) as listener:
            await GatewayServer(app, app.state.gateway).serve(sockets=[listener])


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket. Raises BadSettings where the address is taken or is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise BadSettings(f"cannot listen on {host}, port {port}: {error}; choose another --port") from error
    # Connections inherit it. Without it the second piece of an answer waits some 40 ms for the client's delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with listener:
        yield listener


class GatewayServer(uvicorn.Server):
    """uvicorn that tells the gateway first when it stops, and whose `serve` returns after a signal."""

    def __init__(self, app: object, gateway: Gateway) -> None:
        shutdown_seconds = gateway.settings.shutdown_seconds
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=GatheredProtocol,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=math.ceil(shutdown_seconds),
        )
        super().__init__(config)
        self.gateway = gateway

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            print(f"gateway ready: http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gateway.begin_closing()
        patience = asyncio.create_task(self._close_waiting())
        try:
            await super().shutdown(sockets)
        finally:
            patience.cancel()

    async def _close_waiting(self) -> None:
        """Sends away who still waits, in time for the answer to go out."""
        await asyncio.sleep(WAITING_SHARE * self.gateway.settings.shutdown_seconds)
        await self.gateway.hub.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals ask `serve` to end; unlike uvicorn's own, they do not end the process once more after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        wanted = (signal.SIGINT, signal.SIGTERM)
        for number in wanted:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in wanted:
                loop.remove_signal_handler(number)
