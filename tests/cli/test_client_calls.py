"""The client against answers that a gateway gives on bad days."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.client import retry
from millstream.client.client import Client
from millstream.client.errors import ApiError, BrokenStream, CannotConnect, ClientClosed, NotSucceeded, WaitedTooLong
from tests.cli.http_script import Call, Reply, scripted

JOB: dict[str, Any] = {
    "id": "job-1-aaaaaaaa", "object": "job", "model": "m", "kind": "generate", "status": "succeeded",
    "tier": "standard", "priority": 0, "attempt": 1, "created_at": 1.5, "started_at": 2.0, "finished_at": 3.0,
    "deadline": None, "queue": None, "usage": None, "error": None, "params": {}, "metadata": {},
    "numerics_profile": None, "continued_profiles": [], "retry_of": None,
    "result": {"choices": [{"index": 0, "text": "done", "token_ids": [1], "finish_reason": "stop",
                            "stop_reason": None, "logprobs": None}], "prompt_logprobs": None},
}  # fmt: skip
OK = Reply(body=json.dumps(JOB).encode())


def error(status: int, message: str, **headers: str) -> Reply:
    detail = {"message": message, "type": "t", "param": "model", "code": "c"}
    return Reply(status, json.dumps({"error": detail}).encode(), {"x-request-id": "r1", **headers})


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(retry, "_FIRST_DELAY_SECONDS", 0.001)
    yield


def in_turn(*replies: Reply) -> Any:
    left = list(replies)
    return lambda call: left.pop(0) if len(left) > 1 else left[0]


def test_a_submit_that_is_repeated_carries_one_key() -> None:
    with scripted(in_turn(Reply(hang_up=True), error(503, "later"), OK)) as (url, calls), Client(url) as client:
        job = client.submit("text", model="m", params={"seed": 1})
    assert job.id == JOB["id"]
    assert len(calls) == 3
    assert len({call.headers["idempotency-key"] for call in calls}) == 1
    assert {call.body for call in calls} == {calls[0].body}
    assert json.loads(calls[0].body)["params"] == {"seed": 1}


def test_two_submits_carry_two_keys() -> None:
    with scripted(in_turn(OK)) as (url, calls), Client(url, api_key="k") as client:
        client.submit("text", model="m")
        client.submit("text", model="m")
        client.submit("text", model="m", idempotency_key="mine")
    keys = [call.headers["idempotency-key"] for call in calls]
    assert len(set(keys)) == 3
    assert keys[2] == "mine"
    assert {call.headers["authorization"] for call in calls} == {"Bearer k"}


def test_429_is_waited_out() -> None:
    busy = error(429, "queue full", **{"retry-after": "0"})
    with scripted(in_turn(busy, busy, OK)) as (url, calls), Client(url) as client:
        client.submit("text", model="m")
    assert len(calls) == 3


def test_tries_end_with_the_gateway_s_own_words() -> None:
    with (
        scripted(in_turn(error(503, "the store refuses writes"))) as (url, calls),
        Client(url) as client,
        pytest.raises(ApiError, match="the store refuses writes") as caught,
    ):
        client.submit("text", model="m")
    assert len(calls) == retry.MAX_TRIES
    assert (caught.value.status, caught.value.code, caught.value.param) == (503, "c", "model")
    assert caught.value.request_id == "r1"


def test_a_final_answer_is_not_asked_for_again() -> None:
    with (
        scripted(in_turn(error(404, "no model 'm'"))) as (url, calls),
        Client(url) as client,
        pytest.raises(ApiError, match="no model 'm'"),
    ):
        client.submit("text", model="m")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(404, b"<html>nginx</html>"), "answered 404: <html>nginx</html>"),
        (Reply(200, b"hello"), "answered with something that is not understood"),
        (Reply(200, b"{}"), "missing required field"),
    ],
)
def test_answers_of_something_else(reply: Reply, words: str) -> None:
    with scripted(in_turn(reply)) as (url, _), Client(url) as client, pytest.raises(ApiError, match=words):
        client.job("job-1-aaaaaaaa").get()


def test_nobody_there() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(CannotConnect, match="Start one with `millstream up`"):
        client.models()
    with pytest.raises(CannotConnect, match="not the URL of a gateway"):
        Client("localhost:8080")


def test_waiting_ends_with_the_job_or_the_time() -> None:
    running = Reply(body=json.dumps({**JOB, "status": "running", "result": None}).encode())
    with scripted(in_turn(running, running, OK)) as (url, calls), Client(url) as client:
        assert client.job("job-1-aaaaaaaa").result().choices[0].text == "done"
        assert len(calls) == 3
        assert calls[0].path == "/v1/jobs/job-1-aaaaaaaa?wait=30.0"
    with (
        scripted(in_turn(running)) as (url, _),
        Client(url) as client,
        pytest.raises(WaitedTooLong, match=r"is running after 0\.05 s; it goes on"),
    ):
        client.job("job-1-aaaaaaaa").wait(0.05)


def test_a_job_is_shown_by_its_id_alone() -> None:
    with Client("http://127.0.0.1:1") as client:
        assert repr(client.job("job-1-00")) == "JobHandle(id='job-1-00')"


def test_a_failed_job_has_no_result() -> None:
    detail = {"message": "it broke", "type": "t", "param": None, "code": "worker_lost"}
    failed = Reply(body=json.dumps({**JOB, "status": "failed", "result": None, "error": detail}).encode())
    with (
        scripted(in_turn(failed)) as (url, _),
        Client(url) as client,
        pytest.raises(NotSucceeded, match="has failed: it broke"),
    ):
        client.job("job-1-aaaaaaaa").result()


def test_pages_are_read_as_they_are_taken() -> None:
    pages = [
        Reply(body=json.dumps({"object": "list", "data": [JOB, JOB], "last_id": "x", "has_more": True}).encode()),
        Reply(body=json.dumps({"object": "list", "data": [JOB], "last_id": "y", "has_more": False}).encode()),
    ]
    with scripted(in_turn(*pages)) as (url, calls), Client(url) as client:
        jobs = client.jobs(status="succeeded", page_size=2)
        next(jobs)
        assert [call.path for call in calls] == ["/v1/jobs?status=succeeded&limit=2"]
        assert len(list(jobs)) == 2
        assert calls[1].path == "/v1/jobs?status=succeeded&after=x&limit=2"


# --- streams ---

TEXTS = ["One", " fine 日本", " day 😀", "."]


def log() -> list[bytes]:
    """The event log of a job, framed."""
    events: list[dict[str, Any]] = [{"type": "job.queued"}, {"type": "job.started", "attempt": 1}]
    events += [{"type": "job.delta", "attempt": 1, "deltas": [{"index": 0, "text": text}]} for text in TEXTS]
    events += [{"type": "job.succeeded"}]
    return [
        f"id: {number}\nevent: {event['type']}\ndata: ".encode()
        + json.dumps({**event, "sequence_number": number, "at": 1.0}, ensure_ascii=False).encode()
        + b"\n\n"
        for number, event in enumerate(events)
    ]


def rest_after(call: Call) -> bytes:
    return b"".join(log()[int(call.headers.get("last-event-id", -1)) + 1 :])


@pytest.mark.parametrize("cut_after", [0, 1, 50, 100, 150, 200, 333])
def test_a_stream_that_is_cut_again_and_again_has_every_event_once(cut_after: int) -> None:
    """Each connection gives a few bytes more than the last, so that cuts fall everywhere."""
    num_calls = 0

    def script(call: Call) -> Reply:
        nonlocal num_calls
        num_calls += 1
        return Reply(body=rest_after(call), cut_after=cut_after + 7 * num_calls)

    with scripted(script) as (url, _), Client(url) as client:
        events = list(client.job("job-1-aaaaaaaa").stream())
    assert [event.sequence_number for event in events] == list(range(len(log())))
    assert "".join(d.text for event in events for d in event.deltas or ()) == "".join(TEXTS)
    assert num_calls > 2


def test_a_stream_begins_where_it_is_asked_to() -> None:
    with scripted(lambda call: Reply(body=rest_after(call))) as (url, calls), Client(url) as client:
        events = list(client.job("job-1-aaaaaaaa").stream(after=3))
    assert [event.sequence_number for event in events] == [4, 5, 6]
    assert calls[0].headers["last-event-id"] == "3"


def test_repeats_are_dropped_and_a_gap_is_asked_for_again() -> None:
    frames = log()
    replies = [b"".join(frames[:3] + frames[1:2] + frames[4:]), b"".join(frames)]

    with scripted(in_turn(*(Reply(body=body) for body in replies))) as (url, calls), Client(url) as client:
        events = list(client.job("job-1-aaaaaaaa").stream())
    assert [event.sequence_number for event in events] == list(range(len(frames)))
    assert calls[1].headers["last-event-id"] == "2"


def test_no_content_means_that_nothing_more_comes() -> None:
    with scripted(in_turn(Reply(204))) as (url, calls), Client(url) as client:
        assert list(client.job("job-1-aaaaaaaa").stream(after=6)) == []
    assert len(calls) == 1


def test_an_expired_log_is_an_error_at_once() -> None:
    with (
        scripted(in_turn(error(410, "the event log has expired"))) as (url, calls),
        Client(url) as client,
        pytest.raises(ApiError, match="has expired"),
    ):
        list(client.job("job-1-aaaaaaaa").stream())
    assert len(calls) == 1


def test_a_stream_that_gives_nothing_is_given_up() -> None:
    head = b"".join(log()[:2])
    body = (
        head + b'event: error\ndata: {"error": {"message": "store gone", "type": "t", "param": null, "code": "c"}}\n\n'
    )
    with (
        scripted(lambda call: Reply(body=body)) as (url, _),
        Client(url) as client,
        pytest.raises(BrokenStream, match=r"broke off after number 1 \(store gone\)"),
    ):
        list(client.job("job-1-aaaaaaaa").stream(patience_seconds=0.05))


def test_a_closed_client_says_so() -> None:
    client = Client("http://127.0.0.1:9")
    client.close()
    with pytest.raises(ClientClosed, match="closed"):
        client.models()
    with pytest.raises(ClientClosed, match="closed"):
        list(client.job("job-1-abcdefgh").stream())
