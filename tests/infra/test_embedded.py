"""The embedded server: keeps its data, refuses a second owner of its folder, and ends with the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from infra.embedded import EmbeddedServer, serving
from infra.errors import StoreUnsuitable


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pid: int) -> bool:
    end = time.monotonic() + 20
    while _is_running(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not _is_running(pid)


def test_data_survive_a_restart(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as client:
        client.set("kept", "yes")
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as client:
        assert client.get("kept") == b"yes"
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_stops_with_the_context(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with server:
        pid = server.pid
        assert pid is not None and _is_running(pid)
    assert not _is_running(pid)


def test_a_second_server_in_the_folder_is_refused_and_the_first_lives_on(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url:
        with pytest.raises(StoreUnsuitable, match="another embedded server uses"):
            EmbeddedServer(tmp_path).start()
        with redis.Redis.from_url(url) as client:
            assert client.ping()


def test_a_crashed_server_starts_again(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with redis.Redis.from_url(server.start()) as client:
        client.config_set("appendfsync", "always")
        client.set("kept", "yes")
        server.kill()
    with server as url, redis.Redis.from_url(url) as client:
        assert client.get("kept") == b"yes"


def test_needs_its_password(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as url:
        bare = "redis://" + url.split("@")[1]
        with redis.Redis.from_url(bare) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        assert (tmp_path / "server.conf").stat().st_mode & 0o077 == 0


def test_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from infra.embedded import EmbeddedServer\n"
        "server = EmbeddedServer(Path(sys.argv[1])); server.start(); print(server.pid, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server_pid = int(owner.stdout.readline())
    assert _is_running(server_pid)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert _wait_until_gone(server_pid)
    with EmbeddedServer(tmp_path) as url, redis.Redis.from_url(url) as client:  # nothing stale is left behind
        assert client.ping()


def test_a_given_url_wins(tmp_path: Path) -> None:
    with serving("redis://elsewhere:6379/0", tmp_path / "unused") as url:
        assert url == "redis://elsewhere:6379/0"
    assert not (tmp_path / "unused").exists()
