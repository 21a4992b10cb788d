"""What `helm test` runs, against a server that answers well and badly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.chart.chart_render import Helm, Manifest, find, load_values

Answers = dict[str, tuple[int, object]]


class _Answering(ThreadingHTTPServer):
    answers: Answers


class _Handler(BaseHTTPRequestHandler):
    server: _Answering

    def do_GET(self) -> None:
        status, body = self.server.answers.get(self.path, (404, {}))
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[_Answering]:
    server = _Answering(("127.0.0.1", 0), _Handler)
    server.answers = {"/readyz": (200, {})}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _check(helm: Helm, gateway: _Answering, name: str = "trial") -> subprocess.CompletedProcess[str]:
    """Runs the very command of the test pod, its gateway replaced by ours."""
    pod: Manifest = find(helm.template(load_values(name)), "Pod", "-test")
    [box] = pod["spec"]["containers"]
    program, *arguments = box["command"]
    assert program == "python"
    url = next(argument for argument in arguments if argument.startswith("http://"))
    ours = f"http://127.0.0.1:{gateway.server_port}"
    command = [sys.executable, *[ours if argument == url else argument for argument in arguments]]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_good_gateway_passes(newest_helm: Helm, gateway: _Answering) -> None:
    gateway.answers["/internal/scale/smollm2-135m"] = (200, {"backlog_seconds": 1.5})
    done = _check(newest_helm, gateway)
    assert done.returncode == 0, done.stderr
    assert "smollm2-135m: 1.5 s" in done.stdout


def test_every_alias_is_asked_for(newest_helm: Helm, gateway: _Answering) -> None:
    aliases = ["smollm2-1.7b", "llama-3.3-70b", "smollm2-135m"]
    gateway.answers |= {f"/internal/scale/{alias}": (200, {"backlog_seconds": 0}) for alias in aliases}
    assert _check(newest_helm, gateway, "production").returncode == 0
    del gateway.answers["/internal/scale/llama-3.3-70b"]
    assert _check(newest_helm, gateway, "production").returncode != 0


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/readyz", (503, {})),
        ("/internal/scale/smollm2-135m", (404, {})),
        ("/internal/scale/smollm2-135m", (401, {"error": {}})),
        ("/internal/scale/smollm2-135m", (200, {"backlog": 1})),
        ("/internal/scale/smollm2-135m", (200, {"backlog_seconds": None})),
        ("/internal/scale/smollm2-135m", (200, {"backlog_seconds": "1"})),
        ("/internal/scale/smollm2-135m", (200, {"backlog_seconds": True})),
    ],
)
def test_a_bad_one_fails(newest_helm: Helm, gateway: _Answering, path: str, answer: tuple[int, object]) -> None:
    gateway.answers["/internal/scale/smollm2-135m"] = (200, {"backlog_seconds": 1.5})
    gateway.answers[path] = answer
    assert _check(newest_helm, gateway).returncode != 0
