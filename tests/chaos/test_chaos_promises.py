"""The queue's promises, each under its fault, in the short form: real processes, a real server, a ledger outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.chaos.play import binary_of, run_one
from bench.chaos.record import Record
from bench.chaos.scenarios import SCENARIOS
from bench.chaos.yard import NotHere, Yard
from tests.conftest import skip_or_fail


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_promise_is_kept(name: str, tmp_path: Path) -> None:
    try:
        record = await run_one(name, SCENARIOS[name], Yard(tmp_path, binary_of("valkey"), short=True))
    except NotHere as reason:
        skip_or_fail(str(reason))
    assert record.is_kept, record
    assert record.jobs > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"lost": 1},
        {"duplicates": 1},
        {"gaps": 1},
        {"leaked_blocks": 1},
        {"broken": ["something else"]},
    ],
)
def test_whatever_is_wrong_breaks_the_promise(fields: dict[str, object]) -> None:
    assert Record(promise="p", fault="f").is_kept
    assert not Record(promise="p", fault="f", **fields).is_kept  # type: ignore[arg-type]
