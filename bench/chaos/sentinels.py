"""A primary, a replica, and three sentinels, all real, all on this machine."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis

from bench.chaos.process import ChaosFailed
from infra.embedded import EmbeddedServer
from infra.ports import free_port
from millstream.tether import VARIABLE as TETHER

SERVICE = "millstream"
DOWN_AFTER_MS = 1000
# A sentinel is no program of ours: this ties it to the harness before it becomes one.
_TETHERED = """\
import os, sys
from millstream.tether import tether
tether(os.environ)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass
class Guarded:
    """`url` finds whatever is the primary; `primary` and `replica` are as of the start."""

    primary: EmbeddedServer
    replica: EmbeddedServer
    url: str

    def rejoin(self) -> None:
        """Starts the killed primary again, as a replica of the new one."""
        self.primary.directives = _directives(_password_of(self.primary), self.replica)
        self.primary.start()


@contextmanager
def guarded(folder: Path, binary: Path) -> Iterator[Guarded]:
    folder.mkdir(parents=True, exist_ok=True)
    password = secrets.token_hex(12)
    primary = EmbeddedServer(
        folder / "primary", binary=binary, password=password, directives=_directives(password, None)
    )
    primary.start()
    replica = EmbeddedServer(
        folder / "replica", binary=binary, password=password, directives=_directives(password, primary)
    )
    sentinels: list[subprocess.Popen[bytes]] = []
    try:
        replica.start()
        _wait_for_link(primary)
        ports = [free_port() for _ in range(3)]
        for port in ports:
            sentinels.append(_sentinel(folder, binary, port, primary, password))
        _wait_for_sentinels(ports)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield Guarded(primary, replica, f"redis+sentinel://:{password}@{hosts}/{SERVICE}/0")
    finally:
        for process in sentinels:
            process.kill()
            process.wait()
        replica.kill()
        primary.kill()


def _directives(password: str, primary: EmbeddedServer | None) -> list[str]:
    lines = [f"masterauth {password}", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1"]
    if primary is not None:
        lines.append(f"replicaof 127.0.0.1 {urlsplit(primary.url).port}")
    return lines


def _password_of(server: EmbeddedServer) -> str:
    password = urlsplit(server.url).password
    assert password is not None
    return password


def _sentinel(folder: Path, binary: Path, port: int, primary: EmbeddedServer, password: str) -> subprocess.Popen[bytes]:
    config = folder / f"sentinel-{port}.conf"
    config.write_text(f"""\
bind 127.0.0.1
port {port}
sentinel monitor {SERVICE} 127.0.0.1 {urlsplit(primary.url).port} 2
sentinel auth-pass {SERVICE} {password}
sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}
sentinel failover-timeout {SERVICE} 5000
""")
    with (folder / f"sentinel-{port}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _TETHERED, str(binary), str(config), "--sentinel"],
            env={**os.environ, TETHER: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait_for_link(primary: EmbeddedServer) -> None:
    with redis.Redis.from_url(primary.url) as client:
        for number in range(200):
            client.set("probe", number)
            if client.wait(1, 100) == 1:
                client.delete("probe")
                return
    raise ChaosFailed("the replica does not follow")


def _wait_for_sentinels(ports: list[int]) -> None:
    """Until each knows the two others and the replica: only then can they agree on a failover."""
    end = time.monotonic() + 30
    for port in ports:
        with redis.Redis(port=port) as client:
            while True:
                try:
                    about = client.sentinel_master(SERVICE)
                    if about["num-other-sentinels"] == 2 and about["num-slaves"] == 1:
                        break
                except redis.RedisError as error:
                    if time.monotonic() > end:
                        raise ChaosFailed(f"a sentinel does not answer: {error}") from error
                if time.monotonic() > end:
                    raise ChaosFailed("the sentinels do not find each other")
                time.sleep(0.05)
