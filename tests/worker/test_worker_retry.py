import pytest

from worker.retry import RULES, Fail, Failure, HandOver, Retry, decide


def test_a_bad_request_is_never_tried_again() -> None:
    assert decide(Failure.REQUEST, 0) == Fail("invalid_request")
    assert decide(Failure.GENERATION, 0) == Fail("generation_error")


def test_a_drain_hands_over_however_often() -> None:
    assert decide(Failure.DRAIN, 0) == decide(Failure.DRAIN, 1000) == HandOver()


@pytest.mark.parametrize("failure", [Failure.ENGINE, Failure.PAYLOAD, Failure.WEIGHTS])
def test_retries_wait_longer_each_time_and_end(failure: Failure) -> None:
    rule = RULES[failure]
    decisions = [decide(failure, num_retries) for num_retries in range(rule.max_retries + 1)]
    delays = [decision.delay_seconds for decision in decisions if isinstance(decision, Retry)]
    assert len(delays) == rule.max_retries
    assert delays == sorted(set(delays))
    assert decisions[-1] == Fail(rule.code)
    assert decide(failure, rule.max_retries + 7) == Fail(rule.code)


def test_jitter_stretches_by_less_than_a_half() -> None:
    plain, stretched = decide(Failure.ENGINE, 0), decide(Failure.ENGINE, 0, jitter=0.999)
    assert isinstance(plain, Retry)
    assert isinstance(stretched, Retry)
    assert plain.delay_seconds < stretched.delay_seconds < plain.delay_seconds * 1.5


def test_every_failure_but_a_drain_has_a_rule() -> None:
    assert set(RULES) == set(Failure) - {Failure.DRAIN}
