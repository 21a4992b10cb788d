"""A gateway's answers, scripted: to see what the client makes of those that a real one seldom gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Call:
    method: str
    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes


@dataclass
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    hang_up: bool = False  # close the connection without an answer
    cut_after: int | None = None  # send so many bytes of the body, then reset


Script = Callable[[Call], Reply]


@contextmanager
def scripted(script: Script) -> Iterator[tuple[str, list[Call]]]:
    """Serves `script` on a free port; gives the URL and the calls that came."""
    calls: list[Call] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            call = Call(self.command, self.path, headers, self.rfile.read(length))
            calls.append(call)
            reply = script(call)
            self.close_connection = True
            if reply.hang_up:
                return
            self.send_response(reply.status)
            headers = {"content-type": "application/json", **reply.headers}
            if reply.cut_after is None:
                headers["content-length"] = str(len(reply.body))
            else:
                headers["transfer-encoding"] = "chunked"
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if reply.cut_after is None:
                self.wfile.write(reply.body)
                return
            piece = reply.body[: reply.cut_after]
            if piece:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))  # a chunk, and never the last one

        do_GET = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass  # the test tells what came

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", calls
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
