"""The model of waiting: laws that hold of any queue, and the figures of queues that can be reckoned by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api_gateway import eta
from api_gateway.eta import Ahead, Facts
from infra.contracts import ModelCard, Pace, Tier, WorkerRecord
from infra.store import LaneLoad, Place
from infra.work import Sizes, Work

LANE = 1
EACH = Work(100, 50)
STEP, OUTPUT, PROMPT = 0.02, 0.001, 0.0001
PACE = Pace(seconds_per_step=STEP, seconds_per_output_token=OUTPUT, seconds_per_prompt_token=PROMPT, num_seats=4,
            kv_tokens=10_000)  # fmt: skip


def load(num: dict[Tier, int] | None = None, *, each: Work = EACH, running: int = 0, **fields: Any) -> LaneLoad:
    counts = {str(tier): (num or {}).get(tier, 0) for tier in Tier}
    work = {tier: each.times(count) for tier, count in counts.items()}
    return LaneLoad(waiting=counts, running=running, work=work, **fields)


def worker(*remaining: int, owner: str = "w", **fields: Any) -> WorkerRecord:
    whole = {"alias": "m", "lanes": [LANE], "num_seats": 4, "free_tokens": 10_000, "num_jobs": len(remaining), **fields}
    return WorkerRecord(owner=owner, remaining=sorted(remaining), pace=PACE, **whole)


def facts(lane: LaneLoad, *workers: WorkerRecord, **fields: Any) -> Facts:
    return Facts(**{"loads": {LANE: lane}, "workers": workers, "pace": PACE, **fields})


def token(batch: float) -> float:
    return STEP + batch * OUTPUT


# --- queues that can be reckoned by hand ---


def first_token(known: Facts, ahead: Ahead, own_prompt: float = 100) -> float:
    pool = eta.pool_of(known)
    assert pool is not None
    return pool.first_token_seconds(ahead, own_prompt)


def test_an_idle_worker_begins_at_once() -> None:
    assert first_token(facts(load(), worker()), Ahead()) == pytest.approx(100 * PROMPT + STEP)


def test_prompts_ahead_are_computed_first() -> None:
    queue = facts(load({Tier.STANDARD: 3}), worker(prompt_tokens=500))
    assert first_token(queue, Ahead(2, Work(200, 100))) == pytest.approx((500 + 200 + 100) * PROMPT + STEP)


def test_a_full_worker_lets_in_as_its_sequences_end() -> None:
    queue = facts(load({Tier.STANDARD: 9}, running=4), worker(10, 20, 30, 40))
    turn = 50 * token(4)
    for place, decoding in enumerate([10, 20, 30, 40, 10 + 50, 20 + 50, 30 + 50]):
        ahead = Ahead(place, Work(100, 50).times(place))
        wanted = decoding * token(4) + (place + 1) * 100 * PROMPT + STEP
        assert first_token(queue, ahead) == pytest.approx(wanted), place
    assert turn > 40 * token(4)  # else the order of the seats would be another


def test_what_ran_out_since_the_worker_told_is_taken_off() -> None:
    young = facts(load({Tier.STANDARD: 9}, running=4), worker(10, 20, 30, 40))
    old = replace(young, workers=[worker(10, 20, 30, 40, age_ms=100)])
    assert first_token(young, Ahead()) - first_token(old, Ahead()) == pytest.approx(0.1)


def test_jobs_claimed_since_have_their_turn_before_them() -> None:
    """Two seats were free when the worker told; the lane says that they are taken."""
    queue = facts(load({Tier.STANDARD: 9}, running=4), worker(40, 40, num_jobs=2))
    seconds = first_token(queue, Ahead())
    assert seconds == pytest.approx(40 * token(4) + (2 * 100 + 100) * PROMPT + STEP)


def test_outputs_that_end_early_are_expected_to() -> None:
    half = Sizes(jobs=100, prompt=100, output=500, asked=1000, output_squared=2500, output_by_asked=5000,
                 asked_squared=10_000)  # fmt: skip
    assert (half.output_share, half.spread) == (0.5, 0)
    queue = facts(load({Tier.STANDARD: 9}, running=4, sizes=half), worker(10, 20, 30, 40))
    assert first_token(queue, Ahead(), 0) == pytest.approx(5 * token(4) + STEP)


def test_seats_come_free_evenly_where_outputs_end_at_random() -> None:
    """Memoryless: with four sequences that all have 40 tokens to expect, the first ends after ten on average."""
    wild = Sizes(jobs=100, prompt=0, output=1000, asked=1000, output_squared=20_000, output_by_asked=10_000,
                 asked_squared=10_000)  # fmt: skip
    assert (wild.output_share, wild.spread) == (1, 1)
    queue = facts(load({Tier.STANDARD: 9}, running=4, sizes=wild), worker(40, 40, 40, 40))
    assert first_token(queue, Ahead(), 0) == pytest.approx(10 * token(4) + STEP)
    far = Ahead(7, Work(0, 40 * 7))
    assert first_token(queue, far, 0) == pytest.approx(8 * 10 * token(4) + STEP)


def test_without_a_worker_one_starts_first() -> None:
    queue = facts(load({Tier.STANDARD: 2}), cold_start_seconds=30.0)
    assert first_token(queue, Ahead(1, Work(100, 50))) == pytest.approx(30 + 200 * PROMPT + STEP)
    draining = facts(load({Tier.STANDARD: 2}), worker(takes_jobs=False), cold_start_seconds=30.0)
    assert first_token(draining, Ahead()) > 30


def test_the_jobs_of_a_dead_worker_come_first() -> None:
    alone = facts(load({Tier.STANDARD: 8}), worker())
    orphans = facts(load({Tier.STANDARD: 8}, running=6), worker())  # two more than it could have claimed meanwhile
    ahead = Ahead(4, Work(400, 200))
    assert first_token(orphans, ahead) > first_token(alone, ahead)


def test_tiers_come_by_their_weights() -> None:
    lane = load({Tier.INTERACTIVE: 100, Tier.STANDARD: 2, Tier.BULK: 100})
    place = Place(2, Work(200, 100), running=0)
    ahead = eta.ahead_of(facts(lane), LANE, Tier.STANDARD, place)
    assert ahead.jobs == pytest.approx(2 + 2.5 * 2 + 2.5 / 4)  # 8 : 4 : 1
    few = eta.ahead_of(facts(load({Tier.INTERACTIVE: 1})), LANE, Tier.STANDARD, place)
    assert few.jobs == 2 + 1


def test_other_lanes_take_turns() -> None:
    own, other = load({Tier.STANDARD: 3}), load({Tier.BULK: 2})
    place = Place(3, Work(300, 150), running=0)
    both = facts(own, loads={1: own, 2: other})
    assert eta.ahead_of(both, 1, Tier.STANDARD, place).jobs == 3 + 2
    paused = facts(own, loads={1: own, 2: replace(other, paused=True)})
    assert eta.ahead_of(paused, 1, Tier.STANDARD, place).jobs == 3


def test_nothing_is_said_of_what_was_not_measured_or_stands_still() -> None:
    place = Place(0, Work(), running=0)
    unmeasured = facts(load({Tier.STANDARD: 1}), pace=None)
    assert eta.eta_seconds(unmeasured, LANE, Tier.STANDARD, place, Work(1, 1)) is None
    paused = facts(load({Tier.STANDARD: 1}, paused=True), worker())
    assert eta.eta_seconds(paused, LANE, Tier.STANDARD, place, Work(1, 1)) is None
    assert eta.backlog_seconds(unmeasured) == 1.0
    assert eta.least_finish_seconds(unmeasured, LANE, Tier.STANDARD, Work(9, 9), least_output_tokens=1) == 0.0


def test_a_card_of_rates_alone_is_enough() -> None:
    card = ModelCard(alias="m", max_model_len=100, vocab_size=1, tokenizer_digest="", tokenizer_blob="",
                     weights_digest="", profile="", prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0)  # fmt: skip
    pace = eta.pace_of_card(card)
    assert pace is not None and (pace.seconds_per_prompt_token, pace.seconds_per_output_token) == (0.01, 0.1)
    assert eta.pace_of_card(msgspec.structs.replace(card, decode_tokens_per_s=None)) is None
    assert eta.pace_of_card(msgspec.structs.replace(card, pace=PACE)) == PACE


def test_a_deadline_is_judged_by_all_the_workers_there_may_be() -> None:
    busy = facts(load({Tier.STANDARD: 40}, running=4), worker(50, 50, 50, 50), cold_start_seconds=1.0)
    own = Work(100, 50)

    def least(known: Facts, least_output_tokens: int = 1) -> float:
        return eta.least_finish_seconds(known, LANE, Tier.STANDARD, own, least_output_tokens=least_output_tokens)

    many = replace(busy, max_workers=20)
    assert least(many) < least(busy)
    assert least(many) > 1.0 + 100 * PROMPT  # they have to start
    assert least(replace(many, cold_start_seconds=5.0)) > least(many)
    assert least(many, 50) - least(many, 1) == pytest.approx(49 * token(1))


def test_backlog_is_work_and_workers_follow_it() -> None:
    queue = facts(load({Tier.STANDARD: 30}, each=Work(1000, 500), running=2), worker(100, 100, prompt_tokens=50))
    per_token = token(4) / 4
    wanted = 30 * (1000 * PROMPT + 500 * per_token) + 50 * PROMPT + 200 * per_token
    assert eta.backlog_seconds(queue) == pytest.approx(wanted)
    assert eta.desired_workers(queue, seconds_per_worker=30) == 4
    assert eta.desired_workers(replace(queue, max_workers=2), seconds_per_worker=30) == 2
    assert eta.desired_workers(queue, seconds_per_worker=1e9) == 1
    assert eta.desired_workers(facts(load()), seconds_per_worker=30) == 0
    unfed = facts(load({Tier.STANDARD: 30}, each=Work(1000, 500)), num_unfed=30)
    assert eta.backlog_seconds(unfed) == pytest.approx(2 * eta.backlog_seconds(replace(unfed, num_unfed=0)))


def test_a_refused_client_is_told_when_the_queue_moves() -> None:
    assert eta.retry_after_seconds(facts(load(), pace=None)) == 1.0
    assert eta.retry_after_seconds(facts(load(), worker())) == 1.0
    busy = facts(load({Tier.STANDARD: 9}, running=4), worker(500, 600, 700, 800))
    assert eta.retry_after_seconds(busy) == pytest.approx(500 * token(4))
    assert eta.retry_after_seconds(facts(load({Tier.STANDARD: 9}), cold_start_seconds=300)) == 60.0


# --- laws of any queue ---

amounts = st.integers(0, 3000)
works = st.builds(Work, amounts, amounts)
paces = st.builds(
    Pace,
    seconds_per_step=st.sampled_from([0.0, 0.001, 0.03]),
    seconds_per_output_token=st.sampled_from([0.0, 1e-4, 0.01]),
    seconds_per_prompt_token=st.sampled_from([0.0, 1e-5, 1e-3]),
    num_seats=st.integers(1, 9),
    kv_tokens=st.integers(1, 20_000),
)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    found = Sizes()
    for asked, output, prompt in draw(st.lists(st.tuples(st.integers(1, 500), amounts, amounts), max_size=6)):
        found.note(
            prompt=prompt, cached=draw(st.integers(0, prompt)), output=output, asked=asked, prompt_thought=draw(amounts)
        )
    return found


@st.composite
def worlds(draw: st.DrawFn) -> Facts:
    lanes = {}
    for number in range(1, draw(st.integers(1, 3)) + 1):
        counts = {tier: draw(st.integers(0, 40)) for tier in Tier}
        each = Work(draw(amounts), draw(amounts))
        lanes[number] = replace(load(counts, each=each, running=draw(st.integers(0, 20))), sizes=draw(sizes()))
    workers = []
    for index in range(draw(st.integers(0, 4))):
        remaining = sorted(draw(st.lists(amounts, max_size=5)))
        record = worker(
            *remaining, owner=f"w{index}", num_seats=draw(st.integers(1, 9)), free_tokens=draw(amounts),
            prompt_tokens=draw(amounts), age_ms=draw(st.integers(0, 5000)), takes_jobs=draw(st.booleans()),
        )  # fmt: skip
        workers.append(msgspec.structs.replace(record, pace=draw(st.none() | paces)))
    return Facts(
        loads=lanes, workers=workers, pace=draw(paces), cold_start_seconds=draw(st.sampled_from([0.0, 20.0])),
        max_workers=draw(st.none() | st.integers(1, 8)), num_unfed=draw(st.integers(0, 5)),
    )  # fmt: skip


def seconds_of(known: Facts, tier: Tier, place: Place, own: Work) -> float:
    found = eta.eta_seconds(known, LANE, tier, place, own)
    assert found is not None
    return found


@settings(max_examples=100, deadline=None)
@given(known=worlds(), tier=st.sampled_from(Tier), position=st.integers(0, 60), each=works, own=works)  # fmt: skip
def test_no_wait_is_negative_and_a_place_further_back_waits_no_less(
    known: Facts, tier: Tier, position: int, each: Work, own: Work
) -> None:
    before = -1.0
    for ahead in range(position, position + 12):
        place = Place(ahead, each.times(ahead), running=known.loads[LANE].running)
        now = eta.pool_of(known)
        assert now is not None
        alone = now.first_token_seconds(Ahead(ahead, each.times(ahead)), own.prompt_tokens)
        assert alone >= max(0.0, before - 1e-9)
        before = alone
        assert seconds_of(known, tier, place, own) >= 0


@settings(max_examples=80, deadline=None)
@given(known=worlds(), jobs=st.integers(0, 60), each=works, more=works, own=amounts)
def test_larger_jobs_ahead_or_a_larger_prompt_wait_no_less(
    known: Facts, jobs: int, each: Work, more: Work, own: int
) -> None:
    pool = eta.pool_of(known)
    assert pool is not None
    ahead, larger = Ahead(jobs, each.times(jobs)), Ahead(jobs, (each + more).times(jobs))
    assert pool.first_token_seconds(larger, own) >= pool.first_token_seconds(ahead, own) - 1e-9
    assert pool.first_token_seconds(ahead, own + 50) >= pool.first_token_seconds(ahead, own)


@settings(max_examples=80, deadline=None)
@given(known=worlds(), tier=st.sampled_from(Tier), more=st.integers(1, 20))
def test_backlog_is_zero_only_where_there_is_nothing_to_do(known: Facts, tier: Tier, more: int) -> None:
    for measured in (known, replace(known, pace=None, workers=[])):
        backlog = eta.backlog_seconds(measured)
        wanted = eta.desired_workers(measured, seconds_per_worker=30)
        has_work = bool(measured.num_waiting or measured.num_running or measured.num_unfed)
        assert (backlog > 0) == (wanted > 0) == has_work
        assert backlog >= 0 and wanted <= max(1, measured.max_workers or 10**9)
        unfed = replace(measured, num_unfed=measured.num_unfed + more)
        assert eta.backlog_seconds(unfed) >= max(backlog, 1e-9)


@settings(max_examples=80, deadline=None)
@given(known=worlds(), tier=st.sampled_from(Tier), own=works, more=st.integers(1, 5))
def test_more_workers_make_no_deadline_less_feasible(known: Facts, tier: Tier, own: Work, more: int) -> None:
    def least(max_workers: int) -> float:
        return eta.least_finish_seconds(replace(known, max_workers=max_workers), LANE, tier, own, least_output_tokens=1)

    few = known.max_workers or 1
    assert 0 <= least(few + more) <= least(few) + 1e-9


@settings(max_examples=80, deadline=None)
@given(known=worlds())
def test_retry_after_is_short_and_never_at_once(known: Facts) -> None:
    assert 1.0 <= eta.retry_after_seconds(known) <= 60.0
