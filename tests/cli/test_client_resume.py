"""The client against the real gateway, over connections that break anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from infra.settings import GatewaySettings, StoreSettings, WorkerSettings
from millstream import Client, Stack
from millstream.client.errors import ApiError, WaitedTooLong
from millstream.stack.settings import UpSettings
from tests.cli.cutting_proxy import cutting

PARAMS = {"max_tokens": 60, "seed": 3, "temperature": 1.0}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    stack = Stack(
        store=StoreSettings(cache_dir=folder),
        gateway=GatewaySettings(port=0),
        worker=WorkerSettings(model="fake"),
        engine=EngineConfig(fake_seconds_per_step=0.005),
        up=UpSettings(data_dir=folder),
    )
    with stack:
        yield stack


@pytest.mark.parametrize("seed", range(3))
def test_streams_cut_at_random_bytes_have_no_gap_no_repeat_and_no_foreign_event(stack: Stack, seed: int) -> None:
    randomly = random.Random(seed)
    with Client(stack.url) as direct:
        jobs = [direct.submit(f"job {number}", model="fake", params={**PARAMS, "n": 2}) for number in range(3)]
        with (
            cutting(stack.url, lambda: randomly.randrange(1, 3000)) as (url, cuts),
            Client(url) as client,
        ):
            for job in jobs:
                events = list(client.job(job.id).stream())
                assert [event.sequence_number for event in events] == list(range(len(events)))
                assert events[-1].type == "job.succeeded"
                for choice in job.result().choices:
                    deltas = [d for event in events for d in event.deltas or () if d.index == choice.index]
                    assert "".join(delta.text for delta in deltas) == choice.text
                    assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
            assert len(cuts) >= 3


def test_calls_over_cut_connections_submit_one_job(stack: Stack) -> None:
    """The reply is lost after the job was admitted: the repeated call finds it."""
    budgets = iter([40, 200])
    with Client(stack.url) as direct:
        before = {job.id for job in direct.jobs()}
        with cutting(stack.url, lambda: next(budgets, 10**9)) as (url, cuts), Client(url) as client:
            job = client.submit("once", model="fake", params=PARAMS)
        assert cuts == [40, 200]
        assert {one.id for one in direct.jobs()} - before == {job.id}


def test_cancel_while_it_streams(stack: Stack) -> None:
    with Client(stack.url) as client:
        job = client.submit("to be cancelled", model="fake", params={"max_tokens": 5000, "ignore_eos": True})
        types = []
        for event in job.stream():
            types.append(event.type)
            if event.type == "job.delta" and types.count("job.delta") == 3:
                assert job.cancel().status == "cancelled"
        assert types[-1] == "job.cancelled"
        assert job.cancel().status == "cancelled"  # again changes nothing
        assert job.wait().status == "cancelled"


def test_waiting_with_a_time(stack: Stack) -> None:
    with Client(stack.url) as client:
        job = client.submit("slow", model="fake", params={"max_tokens": 5000, "ignore_eos": True})
        with pytest.raises(WaitedTooLong):
            job.wait(0.05)
        job.cancel()


def test_errors_name_the_field(stack: Stack) -> None:
    with Client(stack.url) as client:
        with pytest.raises(ApiError, match="temperature") as caught:
            client.submit("x", model="fake", params={"temperature": -1})
        assert (caught.value.status, caught.value.param) == (400, "params.temperature")
        with pytest.raises(ApiError) as caught:
            client.submit("x", model="nobody")
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_pages_of_jobs(stack: Stack) -> None:
    with Client(stack.url) as client:
        ids = [client.submit(f"page {number}", model="fake", params={"max_tokens": 1}).id for number in range(5)]
        for job_id in ids:
            client.job(job_id).wait()
        listed = [job.id for job in client.jobs(page_size=2)]
        assert listed[:5] == ids[::-1]
        assert len(listed) == len(set(listed))


def test_the_stack_leaves_nothing(tmp_path: Path) -> None:
    up = UpSettings(data_dir=tmp_path)
    lines: list[str] = []
    with Stack(worker=WorkerSettings(model="fake"), up=up, log=lambda name, line: lines.append(name)) as stack:
        pids = stack.pids
        assert len(pids) == 5
    assert stack.pids == []
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert {"up", "gateway", "worker", "dispatcher", "pipelines"} <= set(lines)
