"""The table of rights: whole, applied by a real server, and no wider than it must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from bench.chaos.clusters import Clustered
from infra import access, keys
from infra.access import ACCESS, acl_line, user_of
from infra.cluster import slot_of
from infra.embedded import EmbeddedServer
from infra.errors import StoreUnsuitable
from infra.jobs import RedisJobs
from infra.runs import scripts as run_scripts
from infra.scripts import LANE_SCRIPTS, OTHER_SCRIPTS
from infra.settings import StoreSettings
from infra.states import Status
from millstream.cli import main
from tests.infra.jobs_for_tests import ALIAS, submitted, success
from tests.infra.test_cluster import Move

PASSWORD = "secret"


def test_every_script_is_called_by_some_process_and_every_name_is_a_script() -> None:
    used = {name for one in ACCESS.values() for name in one.scripts}
    assert used == {*LANE_SCRIPTS, *OTHER_SCRIPTS}
    texts = {name for name, value in vars(run_scripts).items() if isinstance(value, str) and value.startswith("#!lua")}
    assert {name for one in ACCESS.values() for name in one.run_scripts} == texts


def test_commands_of_scripts_are_read_from_their_sources() -> None:
    commands = access.commands_of(access.Access(keys=(), commands=(), scripts=("claim",)))
    assert {"xreadgroup", "xgroup|create", "xinfo|groups", "zadd"} <= set(commands)
    assert not {"xgroup", "xinfo", "waitaof", "wait"} & set(commands)
    assert "wait" in access.commands_of(ACCESS["gateway"], durability="replicated")
    assert {"cluster|slots", "asking"} <= set(access.commands_of(ACCESS["worker"], in_cluster=True))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("acl"))
    server.start()
    with redis.Redis.from_url(server.url) as client:
        for process in ACCESS:
            set_user(client, acl_line(process, PASSWORD))
    yield server
    server.stop()


def set_user(client: redis.Redis, line: str) -> None:
    """Does what the server does with a line of its ACL file."""
    client.execute_command("ACL SETUSER", *line.split()[1:])


def url_of(server: EmbeddedServer, process: str) -> str:
    return f"redis://{user_of(process)}:{PASSWORD}@127.0.0.1:{urlsplit(server.url).port}/0"


@pytest.mark.parametrize(
    ("process", "command"),
    [
        ("worker", ("HGETALL", keys.idempotency("t", "r", "d"))),
        ("worker", ("ZRANGE", keys.tenant_jobs("t"), 0, -1)),
        ("worker", ("GET", "ms:webhooks:secret")),
        ("gateway", ("GET", "ms:webhooks:secret")),
        ("gateway", ("HSET", keys.CARDS, "m", b"")),
        ("pipelines", ("HSET", keys.CARDS, "m", b"")),
        ("dispatcher", ("HGETALL", keys.idempotency("t", "r", "d"))),
        ("operator", ("HGETALL", "ms:{run-1}:run")),
        *((process, command) for process in ACCESS for command in (
            ("FLUSHALL",), ("CONFIG", "SET", "maxmemory", 1), ("KEYS", "*"), ("GET", "another"), ("ACL", "LIST"),
            ("SHUTDOWN",), ("SCRIPT", "FLUSH"), ("PUBLISH", "channel", "word"),
            ("EVAL", "return redis.call('GET', KEYS[1])", 1, "another"),
        )),
    ],
)  # fmt: skip
def test_what_a_process_need_not_do_is_denied(
    guarded: EmbeddedServer, process: str, command: tuple[str | int | bytes, ...]
) -> None:
    with redis.Redis.from_url(url_of(guarded, process)) as client:
        assert client.execute_command("EXISTS", "ms:{1}:job:x") == 0  # it may do something
        with pytest.raises((redis.exceptions.NoPermissionError, redis.ResponseError), match=r"permissions|ACL"):
            client.execute_command(*command)


@pytest.mark.parametrize("process", ["gateway", "pipelines", "operator"])
async def test_whoever_submits_may_bring_a_lane_back(guarded: EmbeddedServer, process: str) -> None:
    await bring_a_lane_back(process, {name: url_of(guarded, name) for name in ACCESS})


async def bring_a_lane_back(process: str, urls: Mapping[str, str]) -> None:
    jobs, operator, dispatcher = [await RedisJobs.connect(urls[name]) for name in (process, "operator", "dispatcher")]
    first = await jobs.open_lane(process)
    await operator.add_lane(process)
    await operator.set_open(first, False)
    assert await dispatcher.drop_drained() == [first]
    await submitted(jobs, first)
    assert first in await jobs.lanes()
    await dispatcher.sweep(first)
    await dispatcher.take_notices(first, limit=10, hide_seconds=30)
    for store in (jobs, operator, dispatcher):
        await store.close()


async def test_a_denial_is_an_error_that_says_so(guarded: EmbeddedServer) -> None:
    worker = await RedisJobs.connect(url_of(guarded, "worker"))
    with pytest.raises(StoreUnsuitable, match="access list denies"):
        await submitted(worker, await worker.open_lane(ALIAS))
    await worker.close()


async def test_jobs_that_must_be_on_disk_need_no_more(tmp_path: Path) -> None:
    kept = StoreSettings(durability="fsync")
    with EmbeddedServer(tmp_path / "server", directives=["appendfsync always"]) as url:
        with redis.Redis.from_url(url) as client:
            has_waitaof = None not in client.execute_command("COMMAND INFO", "WAITAOF")
            for process in ("gateway", "worker", "dispatcher"):
                set_user(client, acl_line(process, PASSWORD, durability="fsync", has_waitaof=has_waitaof))
            client.execute_command("ACL LOG", "RESET")
        at = f"127.0.0.1:{urlsplit(url).port}/0"
        gateway, worker, dispatcher = [
            await RedisJobs.connect(f"redis://{user_of(process)}:{PASSWORD}@{at}", kept=kept)
            for process in ("gateway", "worker", "dispatcher")
        ]
        lane = await gateway.open_lane(ALIAS)
        job_id = await submitted(gateway, lane)
        claim = await worker.claim(lane, "w", free_tokens=None, lease_seconds=30)
        assert claim is not None and await worker.commit(claim.hold, success())
        job = await gateway.get(job_id)
        assert job is not None and job.status is Status.SUCCEEDED and (await gateway.events(job_id))[-1].is_last
        await dispatcher.sweep(lane)
        await dispatcher.take_notices(lane, limit=10, hide_seconds=30)
        with redis.Redis.from_url(url) as client:
            assert client.execute_command("ACL LOG", 10) == []
        for store in (gateway, worker, dispatcher):
            await store.close()


def test_the_command_prints_a_file_that_a_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_DURABILITY", "replicated")
    assert main(["acl"]) == 0
    said = capsys.readouterr()
    logins = [line.split("\t") for line in said.err.splitlines()]
    assert [login[0] for login in logins] == list(ACCESS)
    assert not any(password in said.out for _, _, password in logins)
    file = tmp_path / "users.acl"
    with EmbeddedServer(tmp_path / "plain") as url:  # whose default user stays in the file
        [default] = [line for line in _acl_list(url) if line.startswith("user default ")]
    file.write_text(f"{said.out}{default}\n")
    server = EmbeddedServer(tmp_path / "server", directives=[f"aclfile {file}"])
    server._password = urlsplit(url).password
    with server as url:
        for _, user, password in logins:
            with redis.Redis.from_url(f"redis://{user}:{password}@127.0.0.1:{urlsplit(url).port}/0") as client:
                assert "wait" in " ".join(_commands(url, user))
                assert client.info("server")


def _acl_list(url: str) -> list[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        lines: list[str] = client.acl_list()
        return lines


def _commands(url: str, user: str) -> list[str]:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        found = client.acl_getuser(user)
        return [str(command) for command in found["commands"]]


@pytest.mark.parametrize("process", ["gateway", "pipelines", "operator"])
async def test_whoever_submits_to_a_cluster_may_bring_a_lane_back(
    redis_cluster: Clustered, cluster_url: str, process: str
) -> None:
    hosts = cluster_url.partition("@")[2]
    clients = redis_cluster.clients()
    for client in clients:
        for name in ACCESS:
            set_user(client, acl_line(name, PASSWORD, in_cluster=True))
        client.execute_command("ACL LOG", "RESET")
    await bring_a_lane_back(process, {name: f"redis+cluster://{user_of(name)}:{PASSWORD}@{hosts}" for name in ACCESS})
    for client in clients:
        assert client.execute_command("ACL LOG", 10) == []
        client.execute_command("ACL DELUSER", *map(user_of, ACCESS))
        client.close()


async def test_a_gateway_and_a_worker_of_a_cluster_need_no_more(redis_cluster: Clustered, cluster_url: str) -> None:
    hosts = cluster_url.partition("@")[2]
    clients = redis_cluster.clients()
    for client in clients:
        for process in ("gateway", "worker"):
            set_user(client, acl_line(process, PASSWORD, in_cluster=True))
        client.execute_command("ACL LOG", "RESET")
    gateway = await RedisJobs.connect(f"redis+cluster://{user_of('gateway')}:{PASSWORD}@{hosts}")
    worker = await RedisJobs.connect(f"redis+cluster://{user_of('worker')}:{PASSWORD}@{hosts}")
    for alias in ("a", "b", "c"):
        lane = await gateway.open_lane(alias)
        job_id = await submitted(gateway, lane)
        await worker.wait_for_work([lane], timeout=0.1)
        claim = await worker.claim(lane, "w", free_tokens=None, lease_seconds=30)
        assert claim is not None and claim.job.id == job_id
        move = Move(redis_cluster, slot_of(keys.Lane(lane).state))
        move.begin()
        move.move(keys.Lane(lane).job(job_id))
        assert await gateway.get(job_id) is not None  # by an ASK
        move.move()
        move.end()
        assert await worker.commit(claim.hold, success())
        await gateway.wait_for_events([lane], timeout=0.1)
        assert (await gateway.events(job_id))[-1].is_last
    await gateway.close()
    await worker.close()
    for client in clients:
        assert client.execute_command("ACL LOG", 10) == []
        client.execute_command("ACL DELUSER", user_of("gateway"), user_of("worker"))
        client.close()
