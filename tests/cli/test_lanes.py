"""`millstream lanes`: what there is, and what an operator changes."""

from __future__ import annotations

import asyncio

import pytest

from infra.jobs import RedisJobs
from millstream.cli import main


@pytest.fixture(autouse=True)
def of_this_store(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_REDIS_URL", redis_url)


async def _opened(url: str) -> int:
    store = await RedisJobs.connect(url)
    try:
        return await store.open_lane("m")
    finally:
        await store.close()


def test_a_lane_is_added_paused_closed_and_listed(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = asyncio.run(_opened(redis_url))
    assert main(["lanes", "add", "m"]) == 0
    second = int(capsys.readouterr().out)
    assert main(["lanes", "close", str(first)]) == 0
    assert main(["lanes", "pause", str(first)]) == 0
    assert main(["lanes"]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[:3] for row in rows] == [[str(first), "m", "closed,paused"], [str(second), "m", "open"]]
    assert rows[0][3:] == ["waiting=0", "running=0", "dead=0"]
    assert main(["lanes", "resume", str(first)]) == 0
    assert main(["lanes", "open", str(first)]) == 0
    assert main(["lanes"]) == 0
    assert [line.split("\t")[2] for line in capsys.readouterr().out.splitlines()] == ["open", "open"]


def test_the_last_open_lane_stays_open(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    lane = asyncio.run(_opened(redis_url))
    assert main(["lanes", "close", str(lane)]) == 1
    assert "add another" in capsys.readouterr().err
    assert main(["lanes", "pause", "99"]) == 1
    assert "no lane 99" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["add"], ["list", "m"], ["close"], ["close", "m"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert main(["lanes", *arguments]) == 2
