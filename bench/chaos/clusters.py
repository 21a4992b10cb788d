"""A Cluster of real servers on this machine, of primaries alone or with a replica each."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import redis

from bench.chaos.process import ChaosFailed
from infra.embedded import EmbeddedServer
from infra.ports import free_port

NUM_PRIMARIES = 3
NUM_SLOTS = 16384
NODE_TIMEOUT_MS = 1000
_TRIES_SECONDS = 30.0


@dataclass
class Clustered:
    """`url` names all servers; `primaries` and `replicas` are as of the start, a replica beside its primary."""

    primaries: list[EmbeddedServer]
    replicas: list[EmbeddedServer]
    password: str
    url: str
    tls_url: str = ""  # the same, over TLS

    @property
    def servers(self) -> list[EmbeddedServer]:
        return self.primaries + self.replicas

    def clients(self) -> list[redis.Redis]:
        """An operator's own connections, one to each primary."""
        return [redis.Redis.from_url(server.url) for server in self.primaries]

    def flush(self) -> None:
        for client in self.clients():
            with client:
                client.flushall()

    def holder(self, slot: int) -> EmbeddedServer:
        """The server that has the slot, as the first one that answers says."""
        for server in self.servers:
            with contextlib.suppress(redis.ConnectionError), redis.Redis.from_url(server.url) as client:
                for first, last, primary, *_ in client.execute_command("CLUSTER SLOTS"):
                    if first <= slot <= last:
                        return next(one for one in self.servers if _port(one) == primary[1])
        raise ChaosFailed(f"nobody has slot {slot}")


@contextmanager
def clustered(
    folder: Path,
    binary: Path | None = None,
    *,
    num_replicas: int = 0,
    directives: Sequence[str] = (),
    tls: Sequence[str] = (),
) -> Iterator[Clustered]:
    """`num_replicas`: of each primary, 0 or 1. `tls`: directives of certificates; the servers speak TLS beside, and
    tell each other's TLS ports."""
    password = secrets.token_hex(12)

    def server(name: str) -> EmbeddedServer:
        bus_port = free_port()
        lines = [
            "cluster-enabled yes",
            f"cluster-port {bus_port}",
            f"cluster-node-timeout {NODE_TIMEOUT_MS}",
            f"masterauth {password}",
            "repl-diskless-sync-delay 0",
            "repl-ping-replica-period 1",
            *directives,
        ]
        if tls:
            lines += [f"tls-port {free_port()}", "tls-cluster yes", "tls-replication yes", *tls]
        return EmbeddedServer(folder / name, binary=binary, password=password, directives=lines, num_databases=1)

    primaries = [server(f"primary-{number}") for number in range(NUM_PRIMARIES)]
    replicas = [server(f"replica-{number}") for number in range(NUM_PRIMARIES * num_replicas)]
    try:
        for one in primaries + replicas:
            one.start()
        _meet(primaries, replicas)
        hosts = ",".join(f"127.0.0.1:{_port(one)}" for one in primaries + replicas)
        tls_hosts = ",".join(f"127.0.0.1:{_named(one, 'tls-port ')}" for one in primaries + replicas if tls)
        yield Clustered(
            primaries,
            replicas,
            password,
            f"redis+cluster://:{password}@{hosts}",
            f"rediss+cluster://:{password}@{tls_hosts}",
        )
    finally:
        for one in primaries + replicas:
            one.kill()


def _port(server: EmbeddedServer) -> int:
    port = urlsplit(server.url).port
    assert port is not None
    return port


def _met_port(server: EmbeddedServer) -> int:
    """The port that others learn of it: with `tls-cluster`, that of TLS."""
    has_tls = any(line.startswith("tls-port ") for line in server.directives)
    return _named(server, "tls-port ") if has_tls else _port(server)


def _named(server: EmbeddedServer, directive: str) -> int:
    [line] = [line for line in server.directives if line.startswith(directive)]
    return int(line.removeprefix(directive))


def _meet(primaries: list[EmbeddedServer], replicas: list[EmbeddedServer]) -> None:
    """Each primary takes its third of the slots, each replica its primary; returns when all agree."""
    end = time.monotonic() + _TRIES_SECONDS
    first = primaries[0]
    clients = {server: redis.Redis.from_url(server.url) for server in primaries + replicas}
    try:
        borders = [NUM_SLOTS * number // NUM_PRIMARIES for number in range(NUM_PRIMARIES + 1)]
        for number, server in enumerate(primaries):
            clients[server].execute_command("CLUSTER ADDSLOTSRANGE", borders[number], borders[number + 1] - 1)
            clients[server].execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
        for server in (primaries + replicas)[1:]:
            clients[server].execute_command(
                "CLUSTER MEET", "127.0.0.1", _met_port(first), _named(first, "cluster-port ")
            )
        _until(end, lambda: all(_num_known(client) == len(clients) for client in clients.values()), "meet")
        for primary, replica in zip(primaries, replicas, strict=False):
            name = clients[primary].execute_command("CLUSTER MYID")
            _until(end, lambda replica=replica, name=name: _follows(clients[replica], name), "follow")  # type: ignore[misc]
        _until(end, lambda: all(_is_well(client) for client in clients.values()), "agree")
        if replicas:
            _until(end, lambda: all(_is_followed(clients[primary]) for primary in primaries), "replicate")
    finally:
        for client in clients.values():
            client.close()


def _until(end: float, holds: object, what: str) -> None:
    assert callable(holds)
    while not holds():
        if time.monotonic() > end:
            raise ChaosFailed(f"the servers of the Cluster do not {what}")
        time.sleep(0.02)


def _num_known(client: redis.Redis) -> int:
    return len(client.execute_command("CLUSTER NODES"))


def _follows(client: redis.Redis, primary: str) -> bool:
    try:
        client.execute_command("CLUSTER REPLICATE", primary)
    except redis.ResponseError:  # it does not know the primary yet
        return False
    return True


def _is_well(client: redis.Redis) -> bool:
    return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def _is_followed(client: redis.Redis) -> bool:
    about = client.info("replication")
    return bool(about["connected_slaves"] == 1 and about["slave0"]["state"] == "online")
