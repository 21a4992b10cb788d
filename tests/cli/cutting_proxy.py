"""A TCP proxy that cuts connections: after so many bytes from the server, in the middle of whatever they are."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from urllib.parse import urlsplit


@contextmanager
def cutting(url: str, bytes_until_cut: Callable[[], int]) -> Iterator[tuple[str, list[int]]]:
    """Stands before `url`. Gives its own URL and, growing, how many bytes each connection carried before its cut."""
    there = urlsplit(url)
    cuts: list[int] = []
    stop = Event()
    threads: list[Thread] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)

    def serve(client: socket.socket) -> None:
        budget = bytes_until_cut()
        num_bytes = 0
        with client, socket.create_connection((there.hostname, there.port)) as server:
            up = Thread(target=_copy, args=(client, server), daemon=True)
            up.start()
            with suppress(OSError):
                while not stop.is_set() and (piece := server.recv(min(4096, budget - num_bytes))):
                    client.sendall(piece)
                    num_bytes += len(piece)
                    if num_bytes == budget:
                        cuts.append(num_bytes)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
                        break
            for one in (client, server):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RD)  # a socket that is read in another thread would stay open
            up.join()

    def accept() -> None:
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            client.settimeout(None)
            threads.append(Thread(target=serve, args=(client,), daemon=True))
            threads[-1].start()

    acceptor = Thread(target=accept)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", cuts
    finally:
        stop.set()
        acceptor.join()
        listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(4096):
            target.sendall(piece)
