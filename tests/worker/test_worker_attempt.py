import pytest

from infra.contracts import ChoiceDelta, Claim, Event, EventBody, Job, JobSpec, Kind, Tier
from infra.states import Status
from worker.attempt import Attempt
from worker.progress import Progress, joined


def claim(*, attempt: int = 1, num_events: int = 2, history: list[Event] | None = None) -> Claim:
    job = Job(
        id="job-1-abcdefgh",
        spec=JobSpec(model="m", kind=Kind.GENERATE, prompt="p"),
        status=Status.RUNNING,
        lane=1,
        tier=Tier.STANDARD,
        priority=0,
        tenant="t",
        cost_tokens=10,
        attempt=attempt,
        lost_count=0,
        num_events=num_events,
        created_ms=0,
    )
    return Claim(job=job, history=history or [])


def attempt_with(num_choices: int, **kwargs: int) -> Attempt:
    attempt = Attempt(claim(**kwargs))
    attempt.progress = Progress.of(num_choices)
    return attempt


def test_deltas_of_a_flush_become_one_event() -> None:
    attempt = attempt_with(2)
    attempt.count_prompt(7, 3)
    attempt.add(ChoiceDelta(index=1, text="x", token_ids=[5]))
    attempt.add(ChoiceDelta(index=0, text="a", token_ids=[1]))
    attempt.add(ChoiceDelta(index=0, text="b", token_ids=[2], finish_reason="stop", stop_reason="."))
    publication = attempt.take_publication()
    assert publication is not None
    assert publication.first_number == 2
    (body,) = publication.events
    assert (body.num_prompt_tokens, body.num_cached_tokens) == (7, 3)
    assert body.deltas == [
        ChoiceDelta(index=0, text="ab", token_ids=[1, 2], finish_reason="stop", stop_reason="."),
        ChoiceDelta(index=1, text="x", token_ids=[5]),
    ]


def test_a_publication_stays_the_same_until_it_is_written() -> None:
    attempt = attempt_with(1)
    attempt.add(ChoiceDelta(index=0, token_ids=[1]))
    first = attempt.take_publication()
    attempt.add(ChoiceDelta(index=0, token_ids=[2]))
    assert attempt.take_publication() is first
    attempt.published()
    second = attempt.take_publication()
    assert second is not None
    assert second.first_number == 3
    assert second.events[0].deltas[0].token_ids == [2]
    assert second.events[0].num_prompt_tokens is None
    attempt.published()
    assert attempt.take_publication() is None
    with pytest.raises(ValueError, match="nothing was taken"):
        attempt.published()


def event(number: int, body: EventBody, type: str = "job.delta") -> Event:
    return Event(type=type, sequence_number=number, at_ms=0, body=body)


def test_progress_is_what_the_history_says() -> None:
    history = [
        event(0, EventBody(), "job.queued"),
        event(1, EventBody(attempt=1), "job.started"),
        event(2, EventBody(attempt=1, num_prompt_tokens=9, num_cached_tokens=4, deltas=[
            ChoiceDelta(index=0, text="he", token_ids=[1]),
            ChoiceDelta(index=1, text="yo", token_ids=[8], finish_reason="stop"),
        ])),
        event(3, EventBody(attempt=1, deltas=[ChoiceDelta(index=0, text="llo", token_ids=[2, 3])])),
        event(4, EventBody(attempt=1, reason="retry"), "job.requeued"),
        event(5, EventBody(attempt=2), "job.started"),
    ]  # fmt: skip
    progress = Progress.of(2, history)
    assert [choice.token_ids for choice in progress.choices] == [[1, 2, 3], [8]]
    assert [choice.as_choice().text for choice in progress.choices] == ["hello", "yo"]
    assert not progress.is_finished
    assert (progress.usage.prompt_tokens, progress.usage.completion_tokens, progress.usage.cached_tokens) == (9, 4, 4)
    assert progress.count_prompt(9, 8) is False, "the first attempt's figures stay"
    assert progress.usage.cached_tokens == 4
    assert Attempt(claim(attempt=2, num_events=6, history=history)).num_retries == 1


def test_nothing_follows_the_end_of_a_choice() -> None:
    end = ChoiceDelta(index=0, finish_reason="length")
    with pytest.raises(ValueError, match="finished"):
        joined(end, ChoiceDelta(index=0, token_ids=[1]))
    progress = Progress.of(1)
    progress.choices[0].extend(end)
    assert progress.is_finished
    with pytest.raises(ValueError, match="finished"):
        progress.choices[0].extend(ChoiceDelta(index=0, token_ids=[1]))
