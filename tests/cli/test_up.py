"""`millstream up`: the whole tree, with the fake model, through every part."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from infra.embedded import server_binary
from infra.settings import StoreSettings, WorkerSettings
from millstream import Stack
from millstream.client.client import Client
from millstream.stack.settings import UpSettings
from tests.cli.processes import Up, until

PARAMS = {"max_tokens": 40, "seed": 7}
SLOW = ("--fake-seconds-per-step", "0.05")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts `millstream up` with the fake model and its data in the test's own folder."""
    started: list[Up] = []

    def start(*arguments: str, folder: Path | None = None) -> Up:
        environment = {"MILLSTREAM_CACHE_DIR": str(tmp_path), "MILLSTREAM_MODEL": "fake", "MILLSTREAM_PORT": "0"}
        started.append(Up(*arguments, environment=environment, folder=folder))
        return started[-1]

    yield start
    for one in started:
        with suppress(ProcessLookupError):
            one.end()


def other_command(tmp_path: Path, *arguments: str) -> str:
    """What another command on this machine prints while `up` runs."""
    done = subprocess.run(
        [sys.executable, "-m", "millstream", *arguments],
        env={**os.environ, "MILLSTREAM_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_then_stops_and_leaves_nothing(up: Callable[..., Up], number: int, tmp_path: Path) -> None:
    tree = up("--workers", "2")
    with Client(tree.url()) as client:
        assert client.models() == ["fake"]
        assert client.submit("hello", model="fake", params=PARAMS).result().choices[0].text
    secret = other_command(tmp_path, "webhook-secret")
    assert secret.startswith("whsec_")
    assert other_command(tmp_path, "webhook-secret") == secret  # kept in the embedded server, which it found
    assert sum(" worker" in _argv(pid) for pid in tree.pids()) == 2
    assert tree.stop(number) == 0, tree.log
    assert tree.pids() == []
    ups = [line.partition("| ")[2] for line in tree.lines if line.startswith("        up | ")]
    assert ups[-5:] == [
        "stopping gateway", "stopping worker, worker-2", "stopping pipelines", "stopping dispatcher", "stopped",
    ]  # fmt: skip
    assert not (tmp_path / "data" / "server.url").exists()


def _argv(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_killed_it_leaves_nothing_either(up: Callable[..., Up]) -> None:
    tree = up()
    tree.url()
    assert len(tree.pids()) == 6
    tree.process.kill()
    tree.wait()
    until(lambda: tree.pids() == [], f"left: {[_argv(pid) for pid in tree.pids()]}")


def test_killed_while_it_starts_it_leaves_nothing_either(up: Callable[..., Up]) -> None:
    tree = up()
    until(lambda: len(tree.pids()) >= 3)
    tree.process.kill()
    tree.wait()
    until(lambda: tree.pids() == [])


def test_jobs_survive_a_restart_of_everything(up: Callable[..., Up]) -> None:
    first = up(*SLOW, "--max-num-seqs", "2", "--drain-seconds", "0.2")
    with Client(first.url()) as client:
        ids = [client.submit(f"job {number}", model="fake", params=PARAMS).id for number in range(5)]
        events = client.job(ids[0]).stream()
        seen = [next(events) for _ in range(4)]
    assert first.stop() == 0, first.log
    second = up()
    with Client(second.url()) as client:
        assert [client.job(job_id).wait(60).status for job_id in ids] == ["succeeded"] * 5
        seen += client.job(ids[0]).stream(after=seen[-1].sequence_number)
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        text = "".join(delta.text for event in seen for delta in event.deltas or ())
        undisturbed = client.submit("job 0", model="fake", params=PARAMS).result().choices[0].text
        assert text == client.job(ids[0]).result().choices[0].text == undisturbed
    assert second.stop() == 0


def test_a_process_that_dies_is_started_again(up: Callable[..., Up]) -> None:
    tree = up(*SLOW, "--lease-seconds", "2", "--renew-seconds", "0.5")
    with Client(tree.url()) as client:
        job = client.submit("to be continued", model="fake", params=PARAMS)
        texts, seen = [], []
        for event in job.stream():
            seen.append(event.sequence_number)
            texts += [delta.text for delta in event.deltas or ()]
            if len(seen) == 5:
                for name in ("millstream worker", "millstream gateway", server_binary().name):
                    os.kill(tree.pid_of(name), signal.SIGKILL)
        assert seen == list(range(len(seen)))
        again = client.submit("to be continued", model="fake", params=PARAMS)
        assert "".join(texts) == job.result().choices[0].text == again.result().choices[0].text
    for name in ("worker", "gateway", "server"):
        assert any(f"{name} | ended" in line and "started again" in line for line in tree.lines), tree.log
    assert tree.stop() == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "no-such-model"), "no model 'no-such-model'"),
        (("--block-size", "7"), "block_size: is 7"),
        (("--port", "{taken}"), "cannot listen on 127.0.0.1, port {taken}"),
    ],
)
def test_what_cannot_start_says_why(arguments: tuple[str, ...], reason: str, up: Callable[..., Up]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        tree = up(*(argument.format(taken=taken) for argument in arguments))
        assert tree.wait() in (1, 2)
    assert tree.pids() == []
    assert tree.lines[-1].startswith("millstream: ")
    assert reason.format(taken=taken) in tree.lines[-1], tree.log
    assert "Traceback" not in tree.log


def test_a_folder_that_cannot_be_made_says_which(up: Callable[..., Up], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tree = up("--data-dir", str(tmp_path / "file" / "data"))
    assert tree.wait() == 1
    assert str(tmp_path / "file" / "data") in tree.lines[-1]
    assert "--data-dir" in tree.lines[-1]


def test_folders_of_the_caller_are_not_taken_for_our_packages(up: Callable[..., Up], tmp_path: Path) -> None:
    for name in ("worker", "api_gateway", "millstream"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not this one')\n")
    tree = up(folder=tmp_path)
    assert tree.url().startswith("http://127.0.0.1:"), tree.log
    assert tree.stop() == 0


def test_a_second_one_in_the_same_folder_is_refused(up: Callable[..., Up], tmp_path: Path) -> None:
    first = up()
    url = first.url()
    second = up()
    assert second.wait() == 1
    assert "another embedded server uses" in second.lines[-1]
    assert (tmp_path / "data" / "server.url").exists()
    with Client(url) as client:
        assert client.models() == ["fake"]
    assert first.stop() == 0


def test_a_server_that_is_named_is_used_and_left_running(redis_url: str, tmp_path: Path) -> None:
    stack = Stack(
        store=StoreSettings(redis_url=redis_url),
        worker=WorkerSettings(model="fake"),
        up=UpSettings(data_dir=tmp_path),
        log=lambda name, line: None,
    )
    with stack, Client(stack.url) as client:
        assert (stack.server, len(stack.pids)) == (None, 4)
        assert client.submit("hello", model="fake", params=PARAMS).result().choices[0].text
    with redis.Redis.from_url(redis_url) as server:
        assert server.exists("ms:cards")
