"""The life of a job over HTTP: submit, wait, look, list, cancel, forget."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.gateway.gateway_aids import ALIAS, Running
from tests.gateway.scripted import ScriptedWorker, text_of, until

JOB = {"model": ALIAS, "input": "hello"}


async def test_a_job_is_accepted_and_can_be_waited_for(running: Running, worker: ScriptedWorker) -> None:
    answer = await running.client.post("/v1/jobs", json=JOB)
    assert answer.status_code == 202
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert job["status"] in ("queued", "running", "succeeded")
    assert job["params"]["seed"] >= 0  # drawn here
    job = (await running.client.get(answer.headers["location"], params={"wait": 20})).json()
    assert job["status"] == "succeeded"
    assert job["result"]["choices"][0]["text"] == text_of(6)
    assert job["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11, "cached_tokens": 3}
    assert job["created_at"] <= job["started_at"] <= job["finished_at"]
    assert job["numerics_profile"] == "scripted"
    assert job["queue"] is None and job["error"] is None


async def test_prefer_wait_answers_with_the_finished_job(running: Running, worker: ScriptedWorker) -> None:
    answer = await running.client.post("/v1/jobs", json=JOB, headers={"Prefer": "wait=20"})
    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "wait=20"
    assert answer.json()["status"] == "succeeded"


async def test_prefer_wait_gives_up_in_time(running: Running) -> None:
    answer = await running.client.post("/v1/jobs", json=JOB, headers={"Prefer": "respond-async, wait=1"})
    assert answer.status_code == 202
    assert answer.json()["status"] == "queued"


async def test_chat_input_and_token_ids(running: Running, worker: ScriptedWorker) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    for body, kind, prompt_tokens in (
        ({"model": ALIAS, "input": messages}, "chat", 2),
        ({"model": ALIAS, "input": [1, 2, 3]}, "generate", 3),
    ):
        answer = await running.client.post("/v1/jobs", json=body, headers={"Prefer": "wait=20"})
        assert answer.json()["kind"] == kind
        assert answer.json()["usage"]["prompt_tokens"] == prompt_tokens


async def test_queue_place_of_waiting_jobs(running: Running) -> None:
    ids = [(await running.client.post("/v1/jobs", json=JOB)).json()["id"] for _ in range(3)]
    views = [(await running.client.get(f"/v1/jobs/{job_id}")).json() for job_id in ids]
    assert [view["queue"]["position"] for view in views] == [0, 1, 2]
    ahead = [view["queue"]["ahead_tokens"] for view in views]
    assert ahead[0] == 0 and ahead[1] < ahead[2]
    assert all(view["queue"]["eta_seconds"] is None for view in views)  # nothing has been measured


async def test_cancel_ends_a_running_job_and_is_idempotent(running: Running, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    worker.hold_at = 3
    job_id = (await running.client.post("/v1/jobs", json=JOB)).json()["id"]
    await until(lambda: worker.num_tokens_emitted >= 3)
    for _ in range(2):
        job = (await running.client.post(f"/v1/jobs/{job_id}/cancel")).json()
        assert job["status"] == "cancelled"
    assert job["result"]["choices"][0]["text"] == text_of(3)
    worker.gate.set()
    await asyncio.sleep(0.1)
    assert worker.num_tokens_emitted == 3  # the worker was refused


async def test_delete_forgets_a_finished_job_only(running: Running, worker: ScriptedWorker) -> None:
    worker.gate.clear()
    job_id = (await running.client.post("/v1/jobs", json=JOB)).json()["id"]
    refused = await running.client.delete(f"/v1/jobs/{job_id}")
    assert refused.status_code == 409 and refused.headers["x-should-retry"] == "false"
    worker.gate.set()
    await running.client.get(f"/v1/jobs/{job_id}", params={"wait": 20})
    assert (await running.client.delete(f"/v1/jobs/{job_id}")).json() == {
        "id": job_id, "object": "job", "deleted": True,
    }  # fmt: skip
    assert (await running.client.get(f"/v1/jobs/{job_id}")).status_code == 404


async def test_lists_page_through_every_job_once(running: Running, worker: ScriptedWorker) -> None:
    ids = [(await running.client.post("/v1/jobs", json=JOB)).json()["id"] for _ in range(7)]
    cancelled = ids[2]
    for job_id in ids:
        await running.client.get(f"/v1/jobs/{job_id}", params={"wait": 20})
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 3}
    while True:
        page = (await running.client.get("/v1/jobs", params=query)).json()
        seen += [job["id"] for job in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert sorted(seen) == sorted(ids)
    assert len(page["data"]) == 1
    none = (await running.client.get("/v1/jobs", params={"status": "cancelled"})).json()
    assert none["data"] == [] and not none["has_more"]
    assert cancelled in seen
    found = (await running.client.get("/v1/jobs", params={"model": ALIAS, "status": "succeeded"})).json()
    assert len(found["data"]) == 7
    bad = await running.client.get("/v1/jobs", params={"status": "sleeping"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "status"


async def test_bulk_has_an_outcome_for_each_job(running: Running, worker: ScriptedWorker) -> None:
    jobs = [JOB, {**JOB, "input": ""}, {"model": "nobody", "input": "x"}, {**JOB, "params": {"top_p": 0}}, 3, JOB]
    answer = await running.client.post("/v1/jobs/bulk", json={"jobs": jobs}, headers={"Idempotency-Key": "b"})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["accepted"], body["refused"]) == (2, 4)
    assert [item["status"] for item in body["data"]] == [202, 400, 404, 400, 400, 202]
    assert [item["error"] and item["error"]["param"] for item in body["data"]] == [
        None, "input", "model", "params.top_p", None, None,
    ]  # fmt: skip
    again = await running.client.post("/v1/jobs/bulk", json={"jobs": jobs}, headers={"Idempotency-Key": "b"})
    ids = [item["job"] and item["job"]["id"] for item in body["data"]]
    assert [item["job"] and item["job"]["id"] for item in again.json()["data"]] == ids
    assert len({job_id for job_id in ids if job_id}) == 2
    too_many = await running.client.post("/v1/jobs/bulk", json={"jobs": [JOB] * 1001})
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "jobs"


async def test_timeline_tells_where_the_time_went(running: Running, worker: ScriptedWorker) -> None:
    job = (await running.client.post("/v1/jobs", json=JOB, headers={"Prefer": "wait=20"})).json()
    timeline = (await running.client.get(f"/v1/jobs/{job['id']}/timeline")).json()
    assert [entry["what"] for entry in timeline["entries"]] == ["queued", "started", "first_token", "succeeded"]
    assert timeline["engine"] == {"decode_seconds": 0.5}
    assert 0 <= timeline["queued_seconds"] <= timeline["first_token_seconds"] <= timeline["total_seconds"]


async def test_large_inputs_go_by_the_blob_store(running: Running, store: Any, blobs: Any, card: Any) -> None:
    import msgspec

    from infra.contracts import JobSpec

    await store.put_card(msgspec.structs.replace(card, alias="long", max_model_len=4_000_000))
    text = "long " * 100_000
    job = (await running.client.post("/v1/jobs", json={"model": "long", "input": text})).json()
    record = await store.get(job["id"])
    assert record.spec.prompt is None and record.spec.blob is not None
    spec = msgspec.msgpack.decode(blobs.get(record.spec.blob), type=JobSpec)
    assert spec.prompt == text and spec.params["seed"] == job["params"]["seed"]
