"""The processes start with the very arguments and variables of the chart, and answer its probes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.ports import free_port
from tests.chart.chart_render import Helm, Manifest, container, environment

ALIAS = "stand-in"
VALUES = {"workerPools": {"default": {"model": "fake", "alias": ALIAS, "drainSeconds": 1}}}
API_KEY = "a-key-of-this-test"
PORTS = {
    "MILLSTREAM_PORT",
    "MILLSTREAM_METRICS_PORT",
    "MILLSTREAM_DISPATCHER_HEALTH_PORT",
    "MILLSTREAM_PIPELINES_HEALTH_PORT",
}


class Pod:
    """A container of the chart as a process of this machine."""

    def __init__(self, box: Manifest, here: dict[str, str], log: Path) -> None:
        self.box, self.log, self.port = box, log, free_port()
        variables = {name: value for name, value in environment(box).items() if name.startswith("MILLSTREAM_")}
        moved = PORTS & set(variables)
        said = {name: value for name, value in variables.items() if isinstance(value, str)} | here
        said |= {name: str(self.port) for name in moved}
        assert set(said) >= set(variables) - {"MILLSTREAM_CACHE_SECRET", "MILLSTREAM_ADMIN_KEYS"}
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        with log.open("wb") as output:
            command = [sys.executable, "-m", "millstream", *box["args"]]
            self.process = subprocess.Popen(command, env=inherited | said, stdout=output, stderr=output)

    def answer(self, path: str, key: str | None = None) -> tuple[int, Any]:
        """Status and body; 0 while nobody listens."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except (urllib.error.URLError, ConnectionError):
            return 0, b""

    def probe(self, name: str) -> int:
        return self.answer(self.box[name]["httpGet"]["path"])[0]

    def until(self, what: Any, seconds: float = 60.0) -> None:
        """Waits until `what()` is true; fails where the process has ended or the time is up."""
        end = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def ends_when_told(self, seconds: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextlib.contextmanager
def _pod(helm: Helm, name: str, here: dict[str, str], folder: Path) -> Iterator[Pod]:
    pod = Pod(container(helm.template(VALUES), name), here, folder / f"{name.strip('-')}.log")
    try:
        yield pod
    finally:
        pod.process.kill()
        pod.process.wait()


@pytest.fixture
def here(redis_url: str, tmp_path: Path) -> dict[str, str]:
    """What a Secret or a volume of the cluster would give."""
    return {
        "MILLSTREAM_REDIS_URL": redis_url,
        "MILLSTREAM_BLOB_URL": (tmp_path / "blobs").as_uri(),
        "MILLSTREAM_CACHE_DIR": str(tmp_path / "cache"),
    }


def test_a_first_install_comes_up(newest_helm: Helm, here: dict[str, str], tmp_path: Path) -> None:
    """The gateway lives at once, and is ready and answers autoscalers when a worker has said what it serves."""
    gateway_here = here | {"MILLSTREAM_API_KEYS": API_KEY}
    with _pod(newest_helm, "-gateway", gateway_here, tmp_path) as gateway:
        gateway.until(lambda: gateway.probe("startupProbe") == 200)
        assert gateway.probe("livenessProbe") == 200
        assert gateway.probe("readinessProbe") == 503
        with _pod(newest_helm, "-worker-default", here, tmp_path) as worker:
            worker.until(lambda: worker.probe("startupProbe") == 200)
            assert worker.probe("livenessProbe") == worker.probe("readinessProbe") == 200
            gateway.until(lambda: gateway.probe("readinessProbe") == 200)
            status, body = gateway.answer(f"/internal/scale/{ALIAS}")
            assert (status, json.loads(body)["backlog_seconds"]) == (200, 0)
            assert [gateway.answer("/v1/models", key)[0] for key in (None, "another", API_KEY)] == [401, 401, 200]
            assert worker.ends_when_told() == 0
        assert gateway.ends_when_told() == 0


@pytest.mark.parametrize("name", ["dispatcher", "pipelines"])
def test_the_processes_without_a_service_answer_their_probes_and_end(
    newest_helm: Helm, here: dict[str, str], tmp_path: Path, name: str
) -> None:
    with _pod(newest_helm, f"-{name}", here, tmp_path) as pod:
        pod.until(lambda: f"{name} ready" in pod.log.read_text())
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert pod.probe(probe) == 200
        assert pod.answer("/")[0] == 404
        assert pod.ends_when_told() == 0
