"""The bundled store: a real server starts with the very arguments of the chart, and keeps what it must keep."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from infra.embedded import server_binary
from infra.ports import free_port
from tests.chart.chart_render import Helm, Manifest, find, load_values, of_kind

NO_RETRY = Retry(NoBackoff(), 0)


def _arguments(manifests: list[Manifest], folder: Path) -> list[str]:
    """The server's arguments, its mounted folders replaced by folders of this machine."""
    [box] = find(manifests, "StatefulSet", "-valkey")["spec"]["template"]["spec"]["containers"]
    assert box["command"] == ["valkey-server"]
    mounts = {mount["name"]: mount["mountPath"] for mount in box["volumeMounts"]}
    (folder / "data").mkdir(exist_ok=True)
    config = folder / "valkey.conf"
    config.write_text(find(manifests, "Secret", "-valkey")["stringData"]["valkey.conf"])
    here = {mounts["data"]: str(folder / "data"), f"{mounts['config']}/valkey.conf": str(config)}
    return [here.get(argument, argument) for argument in box["args"]]


@contextlib.contextmanager
def _running(arguments: list[str], password: str, log: Path) -> Iterator[redis.Redis]:
    port = free_port()
    with log.open("ab") as output:
        command = [str(server_binary()), *arguments, "--port", str(port), "--bind", "127.0.0.1"]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    client = redis.Redis(port=port, password=password, retry=NO_RETRY, decode_responses=True)
    try:
        for _ in range(400):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(redis.ConnectionError):
                client.ping()
                break
            time.sleep(0.025)
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def test_a_server_takes_the_arguments_and_keeps_jobs(newest_helm: Helm, tmp_path: Path) -> None:
    manifests = newest_helm.template()
    secret = find(manifests, "Secret", "-valkey")["stringData"]
    arguments = _arguments(manifests, tmp_path)
    with _running(arguments, secret["password"], tmp_path / "log") as server:
        assert server.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert server.config_get("appendonly") == {"appendonly": "yes"}
        assert server.config_get("maxmemory") == {"maxmemory": str(512 * 1024 * 1024)}
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=server.connection_pool.connection_kwargs["port"], retry=NO_RETRY).ping()
        server.set("job", "kept")
        assert server.config_get("appendfsync") == {"appendfsync": "everysec"}
    with _running(arguments, secret["password"], tmp_path / "log") as server:  # the first one was killed
        assert server.get("job") == "kept"


def test_the_processes_log_in_with_the_drawn_password(newest_helm: Helm) -> None:
    secret = find(newest_helm.template(), "Secret", "-valkey")["stringData"]
    reached = redis.Redis.from_url(secret["url"]).connection_pool.connection_kwargs
    assert reached["password"] == secret["password"]
    assert (reached["host"], reached["port"], reached["db"]) == ("ms-millstream-valkey.llm.svc", 6379, 0)


def test_memory_leaves_room_for_a_copy(newest_helm: Helm) -> None:
    """A rewrite of the append-only file forks: the limit must hold twice what the server may."""
    [box] = find(newest_helm.template(), "StatefulSet", "-valkey")["spec"]["template"]["spec"]["containers"]
    most = box["args"][box["args"].index("--maxmemory") + 1]
    assert (most, box["resources"]["limits"]["memory"]) == ("512mb", "1Gi")


def test_with_a_store_of_ones_own_none_is_made(newest_helm: Helm) -> None:
    for name in ("production", "fixed"):
        manifests = newest_helm.template(load_values(name))
        assert not of_kind(manifests, "StatefulSet")
        assert not [one for one in manifests if "valkey" in one["metadata"]["name"]]
