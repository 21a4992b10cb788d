"""Several lanes of a model, over HTTP: new jobs go to all open ones, figures are sums."""

from __future__ import annotations

import asyncio

import pytest

from api_gateway import cards
from infra import keys
from infra.store import JobStore
from tests.gateway.gateway_aids import ALIAS, Running

JOB = {"model": ALIAS, "input": "hello"}


@pytest.fixture(autouse=True)
def fresh_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "FRESH_SECONDS", 0.0)


async def lanes_of_new_jobs(running: Running, count: int) -> list[int]:
    bodies = await asyncio.gather(*(running.client.post("/v1/jobs", json=JOB) for _ in range(count)))
    return [keys.lane_of(body.json()["id"]) for body in bodies]


async def test_new_jobs_go_to_all_open_lanes_and_to_no_closed_one(running: Running, store: JobStore) -> None:
    first = await store.open_lane(ALIAS)
    assert set(await lanes_of_new_jobs(running, 5)) == {first}
    second = await store.add_lane(ALIAS)
    assert set(await lanes_of_new_jobs(running, 40)) == {first, second}  # by chance all alike: once in 5e11
    await store.set_open(first, False)
    assert set(await lanes_of_new_jobs(running, 10)) == {second}


async def test_places_and_the_scaling_signal_are_sums_over_lanes(running: Running, store: JobStore) -> None:
    first = await store.open_lane(ALIAS)
    second = await store.add_lane(ALIAS)
    lanes = await lanes_of_new_jobs(running, 40)
    scale = (await running.client.get(f"/internal/scale/{ALIAS}")).json()
    assert (scale["queued"], scale["lanes"]) == (40, [first, second])
    loads = {lane: (await store.load(lane)).num_waiting for lane in (first, second)}
    assert loads == {lane: lanes.count(lane) for lane in (first, second)}
    last = (await running.client.post("/v1/jobs", json=JOB)).json()
    own = keys.lane_of(last["id"])
    other = second if own == first else first
    # As many go ahead from the other lane as from its own, if it has so many.
    await asyncio.sleep(0.3)  # facts are a quarter of a second old at most
    place = (await running.client.get(f"/v1/jobs/{last['id']}")).json()["queue"]["position"]
    assert place == loads[own] + min(loads[other], loads[own])


async def test_a_key_keeps_its_job_when_its_lane_is_dropped(running: Running, store: JobStore) -> None:
    first = await store.open_lane(ALIAS)
    headers = {"Idempotency-Key": "once"}
    job_id = (await running.client.post("/v1/jobs", json=JOB, headers=headers)).json()["id"]
    second = await store.add_lane(ALIAS)
    await store.set_open(first, False)
    await store.cancel(job_id)
    assert await store.drop_drained() == [first]
    again = (await running.client.post("/v1/jobs", json=JOB, headers=headers)).json()
    assert (again["id"], again["status"]) == (job_id, "cancelled")
    assert set(await lanes_of_new_jobs(running, 5)) == {second}
