"""What every job store does, over each backend: admission, claiming, publishing, ending, and who may not."""

from __future__ import annotations

import asyncio

import pytest

from infra import keys
from infra.contracts import Claim, EventBody, Hold, JobError, ModelCard, Outcome, RunItem, Tier, Usage, Webhook
from infra.errors import Conflict, EventsGone, IdempotencyMismatch, QueueFull, SuspectWaits, UnknownJob
from infra.jobs import RedisJobs
from infra.losses import MAX_LOST_COUNT
from infra.memory import MemoryJobs
from infra.settings import QueueSettings
from infra.states import Status
from infra.store import JobStore
from tests.infra.jobs_for_tests import (
    ALIAS,
    ENOUGH_MS,
    LEASE,
    SHORT,
    check_log,
    claimed,
    delta,
    lapse,
    new_job,
    publication,
    submitted,
    success,
    types,
)


@pytest.fixture
async def lane(store: JobStore) -> int:
    return await store.open_lane(ALIAS)


# --- lanes, cards, keys ---


async def test_lanes_are_made_once_and_never_renamed(store: JobStore) -> None:
    first, second = await store.open_lane("a"), await store.open_lane("b")
    assert first != second
    assert await store.open_lane("a") == first
    assert await store.lanes("a") == [first]
    assert await store.lanes() == sorted([first, second])
    assert await store.lanes("none") == []


async def test_cards_come_back_as_they_were(store: JobStore) -> None:
    card = ModelCard(
        alias=ALIAS, max_model_len=2048, vocab_size=49152, tokenizer_digest="t", tokenizer_blob="b",
        weights_digest="w", profile="p", eos_token_ids=[0, 2], decode_tokens_per_s=12.5,
    )  # fmt: skip
    assert await store.cards() == {}
    await store.put_card(card)
    assert await store.cards() == {ALIAS: card}


async def test_an_idempotency_key_names_one_job(store: JobStore) -> None:
    assert await store.claim_key("tenant", "jobs", "key", "body-1", "job-1-aaaaaaaa") == "job-1-aaaaaaaa"
    assert await store.claim_key("tenant", "jobs", "key", "body-1", "job-1-bbbbbbbb") == "job-1-aaaaaaaa"
    assert await store.claim_key("other", "jobs", "key", "body-1", "job-1-bbbbbbbb") == "job-1-bbbbbbbb"
    assert await store.claim_key("tenant", "chat", "key", "body-1", "job-1-cccccccc") == "job-1-cccccccc"
    with pytest.raises(IdempotencyMismatch):
        await store.claim_key("tenant", "jobs", "key", "body-2", "job-1-aaaaaaaa")


# --- admission ---


async def test_submit_keeps_all_that_was_given(store: JobStore, lane: int) -> None:
    job = new_job(lane, tier=Tier.BULK, cost_tokens=77, tenant="acme", attempt_timeout_ms=900, deadline_ms=10**15)
    assert await store.submit(job)
    record = await store.get(job.id)
    assert record is not None
    assert record.spec == job.spec
    assert (record.status, record.lane, record.tier, record.tenant) == (Status.QUEUED, lane, Tier.BULK, "acme")
    assert (record.cost_tokens, record.attempt, record.lost_count, record.num_events) == (77, 0, 0, 1)
    assert (record.attempt_timeout_ms, record.deadline_ms) == (900, 10**15)
    assert record.traceparent == job.traceparent
    assert record.outcome is None and record.started_ms is None and record.owner is None
    assert types(await check_log(store, job.id)) == ["queued"]


async def test_submitting_twice_admits_once(store: JobStore, lane: int) -> None:
    job = new_job(lane)
    answers = await asyncio.gather(*(store.submit(job) for _ in range(20)))
    [admitted] = [answer for answer in answers if answer is not None]
    assert admitted == await store.look(job.id)  # the answer is what a look says
    assert (await store.load(lane)).waiting == {"interactive": 0, "standard": 1, "bulk": 0}
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is not None
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None
    assert not await store.submit(job)  # also while it runs


async def test_a_full_queue_refuses_and_keeps_nothing(store: JobStore, lane: int) -> None:
    first = await submitted(store, lane)
    await submitted(store, lane, tier=Tier.BULK)
    refused = new_job(lane)
    with pytest.raises(QueueFull):
        await store.submit(refused, max_waiting=2)
    assert await store.get(refused.id) is None
    assert refused.id not in [job.id for job in await store.list_jobs("default", limit=10)]
    assert (await claimed(store, lane)).job.id == first
    assert await store.submit(refused, max_waiting=2)  # a running job waits no more


async def test_unknown_jobs(store: JobStore, lane: int) -> None:
    unknown = keys.new_job_id(lane)
    assert await store.get(unknown) is None
    assert await store.cancel(unknown) is None
    assert await store.position(unknown) is None
    assert await store.delete(unknown) is False
    with pytest.raises(UnknownJob):
        await store.events(unknown)
    with pytest.raises(UnknownJob):
        await store.get("not a job id")
    hold = Hold(job_id=unknown, attempt=1)
    assert await store.renew(lane, [hold], lease_seconds=LEASE) == [hold]
    assert not await store.commit(hold, success())
    assert not await store.release(hold, reason="retry")


async def test_jobs_are_listed_newest_first_by_tenant(store: JobStore, lane: int) -> None:
    mine = []
    for _ in range(5):
        mine.append(await submitted(store, lane, tenant="me"))
        await asyncio.sleep(0.002)  # the next millisecond
    await submitted(store, lane, tenant="you")
    newest_first = mine[::-1]
    page = await store.list_jobs("me", limit=2)
    assert [job.id for job in page] == newest_first[:2]
    page = await store.list_jobs("me", limit=10, after=page[-1].id)
    assert [job.id for job in page] == newest_first[2:]
    assert await store.list_jobs("nobody", limit=10) == []
    with pytest.raises(UnknownJob):
        await store.list_jobs("you", limit=10, after=mine[0])


# --- claiming ---


async def test_a_claim_starts_the_first_attempt(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await store.claim(lane, "worker-1", free_tokens=10, lease_seconds=LEASE, profile="fp32-cpu")
    assert claim is not None and claim.job.id == job_id
    assert claim.hold == Hold(job_id=job_id, attempt=1)
    assert claim.history == []
    assert (claim.job.status, claim.job.owner, claim.job.profile) == (Status.RUNNING, "worker-1", "fp32-cpu")
    assert claim.job == await store.get(job_id)
    assert types(await check_log(store, job_id)) == ["queued", "started"]
    load = await store.load(lane)
    assert (load.running, sum(load.waiting.values())) == (1, 0)


async def test_a_claim_repeated_by_its_name_returns_what_it_started(store: JobStore, lane: int) -> None:
    job_id, other = await submitted(store, lane), await submitted(store, lane)

    async def claim(call: str, owner: str = "worker-1", lease_seconds: float = LEASE) -> Claim | None:
        return await store.claim(lane, owner, free_tokens=None, lease_seconds=lease_seconds, call=call)

    first = await claim("1")
    assert first is not None and first.job.id == job_id
    again = await claim("1", lease_seconds=SHORT)
    assert again == first
    await lapse()
    assert await claim("1") == first  # over its lease, but nobody else has it
    assert (await claim("1", "worker-2") or first).job.id == other  # a name is its owner's alone
    third = await submitted(store, lane)
    assert (await claim("2") or first).job.id == third
    assert await claim("1") is None  # the owner has gone on to its next
    assert await store.commit(first.hold, success())
    job = await store.get(job_id)
    assert job is not None and (job.attempt, job.lost_count) == (1, 0)
    assert types(await check_log(store, job_id)) == ["queued", "started", "succeeded"]


async def test_a_claim_is_not_repeated_for_a_job_that_moved_on(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    first = await store.claim(lane, "worker-1", free_tokens=None, lease_seconds=SHORT, call="1")
    assert first is not None
    await lapse()
    assert (await claimed(store, lane, "worker-2")).hold == Hold(job_id=job_id, attempt=2)
    assert await store.claim(lane, "worker-1", free_tokens=None, lease_seconds=LEASE, call="1") is None


async def test_a_job_says_which_profiles_its_tokens_come_from(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)

    async def claim(profile: str) -> Claim:
        claim = await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE, profile=profile)
        assert claim is not None
        return claim

    await store.release((await claim("w1;device=cuda")).hold, reason="hand_over")
    first = await claim("w1;device=cpu")  # the one before has emitted nothing: these are this one's tokens
    await store.publish(lane, [publication(first, delta("a", 1))])
    await store.release(first.hold, reason="hand_over")
    for profile in ("w1;device=cuda", "w1;device=cpu", "w1;device=cuda", "w2;device=cpu"):
        await store.release((await claim(profile)).hold, reason="hand_over")
    job = await store.get(job_id)
    assert job is not None
    assert (job.profile, job.continued_profiles) == ("w1;device=cpu", ["w1;device=cuda"])
    starts = [event.body.profile for event in await check_log(store, job_id) if event.type == "job.started"]
    assert starts == [None, None, "w1;device=cuda", None, "w1;device=cuda", None]


async def test_each_job_is_claimed_by_one_of_many_workers(store: JobStore, lane: int) -> None:
    ids = {await submitted(store, lane) for _ in range(30)}

    async def work(owner: str) -> list[str]:
        mine = []
        while (claim := await store.claim(lane, owner, free_tokens=None, lease_seconds=LEASE)) is not None:
            mine.append(claim.job.id)
        return mine

    shares = await asyncio.gather(*(work(f"worker-{i}") for i in range(4)))
    got = [job_id for share in shares for job_id in share]
    assert sorted(got) == sorted(ids)


async def test_a_tier_is_served_in_order_of_arrival(store: JobStore, lane: int) -> None:
    ids = [await submitted(store, lane) for _ in range(5)]
    assert [(await claimed(store, lane)).job.id for _ in ids] == ids


async def test_tiers_share_by_weight(store: JobStore, lane: int) -> None:
    for tier in Tier:
        for _ in range(26):
            await submitted(store, lane, tier=tier)
    served = [(await claimed(store, lane)).job.tier for _ in range(26)]
    assert [served.count(tier) for tier in Tier] == [16, 8, 2]
    assert Tier.BULK in served[:13] and Tier.BULK in served[13:]


async def test_an_idle_tier_saves_up_no_credit(store: JobStore, lane: int) -> None:
    for _ in range(20):
        await submitted(store, lane, tier=Tier.INTERACTIVE)
    for _ in range(10):
        await claimed(store, lane)
    for _ in range(10):
        await submitted(store, lane, tier=Tier.BULK)
    served = [(await claimed(store, lane)).job.tier for _ in range(10)]
    assert served.count(Tier.BULK) <= 2


async def test_only_what_fits_is_claimed(store: JobStore, lane: int) -> None:
    big = await submitted(store, lane, tier=Tier.INTERACTIVE, cost_tokens=500)
    small = await submitted(store, lane, tier=Tier.BULK, cost_tokens=100)
    assert await store.claim(lane, "w", free_tokens=99, lease_seconds=LEASE) is None
    claim = await store.claim(lane, "w", free_tokens=100, lease_seconds=LEASE)
    assert claim is not None and claim.job.id == small  # the interactive head does not fit, so the next tier's goes
    assert await store.claim(lane, "w", free_tokens=499, lease_seconds=LEASE) is None
    assert (await claimed(store, lane)).job.id == big  # an idle worker takes any


async def test_a_big_job_given_back_waits_for_room(store: JobStore, lane: int) -> None:
    big = await submitted(store, lane, cost_tokens=500)
    assert await store.release((await claimed(store, lane)).hold, reason="retry")
    small = await submitted(store, lane, cost_tokens=10)
    claim = await store.claim(lane, "w", free_tokens=100, lease_seconds=LEASE)
    assert claim is not None and claim.job.id == small
    claim = await store.claim(lane, "w", free_tokens=500, lease_seconds=LEASE)
    assert claim is not None and claim.job.id == big


async def test_a_paused_lane_gives_nothing_out(store: JobStore, lane: int) -> None:
    await store.set_paused(lane, True)
    await submitted(store, lane)
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None
    assert (await store.load(lane)).paused
    await store.set_paused(lane, False)
    assert not (await store.load(lane)).paused
    await claimed(store, lane)


# --- leases, attempts, fences ---


async def test_a_lapsed_lease_is_claimed_again_with_the_history(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    first = await claimed(store, lane, "worker-1", lease_seconds=SHORT)
    await store.publish(lane, [publication(first, delta("Hel", 1), delta("lo", 2))])
    await lapse()
    second = await claimed(store, lane, "worker-2")
    assert (second.job.id, second.job.attempt, second.job.lost_count) == (job_id, 2, 1)
    assert second.job.owner == "worker-2"
    assert types(second.history) == ["queued", "started", "delta", "delta", "requeued"]
    assert [token for event in second.history for d in event.body.deltas for token in d.token_ids] == [1, 2]
    events = await check_log(store, job_id)
    assert types(events) == ["queued", "started", "delta", "delta", "requeued", "started"]
    assert (events[4].body.reason, events[4].body.attempt, events[5].body.attempt) == ("lease_lost", 1, 2)
    assert second.job.num_events == 6


async def test_a_renewed_lease_is_not_taken(store: JobStore, lane: int) -> None:
    await submitted(store, lane)
    claim = await claimed(store, lane, lease_seconds=SHORT)
    assert await store.renew(lane, [claim.hold], lease_seconds=LEASE) == []
    await lapse()
    assert await store.claim(lane, "thief", free_tokens=None, lease_seconds=LEASE) is None
    assert await store.commit(claim.hold, success())


async def test_a_zombie_is_refused_everywhere(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    zombie = await claimed(store, lane, "worker-1", lease_seconds=SHORT)
    await lapse()
    living = await claimed(store, lane, "worker-2")
    before = await store.events(job_id)
    assert await store.renew(lane, [zombie.hold, living.hold], lease_seconds=LEASE) == [zombie.hold]
    assert await store.publish(lane, [publication(zombie, delta("x", 9))]) == [zombie.hold]
    assert not await store.release(zombie.hold, reason="hand_over")
    assert not await store.commit(zombie.hold, success("wrong"), last=publication(zombie, delta("x", 9)))
    assert await store.events(job_id) == before
    assert await store.commit(living.hold, success("right", 1))
    record = await store.get(job_id)
    assert record is not None and record.outcome == success("right", 1)
    assert not await store.commit(zombie.hold, success("wrong"))
    assert await store.get(job_id) == record
    await check_log(store, job_id)


async def test_a_zombie_beside_a_good_hold_spoils_only_itself(store: JobStore, lane: int) -> None:
    await submitted(store, lane)
    zombie = await claimed(store, lane, lease_seconds=SHORT)
    await lapse()
    await claimed(store, lane)
    good_id = await submitted(store, lane)
    good = await claimed(store, lane)
    both = [publication(zombie, delta("x", 9)), publication(good, delta("y", 8))]
    assert await store.publish(lane, both) == [zombie.hold]
    assert types(await store.events(good_id)) == ["queued", "started", "delta"]


async def test_three_lost_workers_make_a_dead_letter(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane, webhook=Webhook(url="https://example.com/hook"))
    for expected in range(3):
        claim = await claimed(store, lane, lease_seconds=SHORT)
        assert (claim.job.attempt, claim.job.lost_count) == (expected + 1, expected)
        await lapse()
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None
    record = await store.get(job_id)
    assert record is not None and record.outcome is not None and record.outcome.error is not None
    assert (record.status, record.lost_count, record.outcome.error.code) == (Status.FAILED, 3, "worker_lost")
    assert await store.dead_letters(lane) == [job_id]
    assert types(await check_log(store, job_id))[-2:] == ["started", "failed"]
    assert [notice.event for notice in await store.take_notices(lane, limit=9, hide_seconds=9)] == ["job.failed"]
    assert not await store.commit(claim.hold, success())


async def test_a_suspect_goes_to_a_worker_that_runs_nothing(store: JobStore, lane: int) -> None:
    suspect = await submitted(store, lane)
    for _ in range(2):
        assert (await claimed(store, lane, lease_seconds=SHORT)).job.id == suspect
        await lapse()
    others = [await submitted(store, lane) for _ in range(2)]

    async def claim_beside(owner: str) -> str | None:
        claim = await store.claim(lane, owner, free_tokens=None, lease_seconds=LEASE, alone=False)
        return claim and claim.job.id

    for _ in range(2):
        with pytest.raises(SuspectWaits):  # asked first: to make room, as long as the suspect waits
            await claim_beside("one")
    assert [await claim_beside("two"), await claim_beside("two"), await claim_beside("two")] == [*others, None]
    claim = await claimed(store, lane, "three")
    assert (claim.job.id, claim.job.lost_count, claim.job.stuck_count) == (suspect, 2, 2)
    assert await claim_beside("one") is None  # nobody has to make room any more


async def test_a_job_that_gets_further_between_losses_is_no_suspect(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    for number in range(MAX_LOST_COUNT):
        alone = number == MAX_LOST_COUNT - 1  # whoever lost nine workers has the tenth to itself
        claim = await store.claim(lane, "w", free_tokens=None, lease_seconds=SHORT, alone=alone)
        assert claim is not None and (claim.job.id, claim.job.lost_count) == (job_id, number)
        assert claim.job.stuck_count == min(number, 1)
        await store.publish(lane, [publication(claim, delta("x", number))])
        await lapse()
    assert (await store.sweep(lane)).failed == [job_id]
    assert await store.dead_letters(lane) == [job_id]


async def test_three_losses_in_a_row_without_a_new_token_bury_a_job_that_had_begun_well(
    store: JobStore, lane: int
) -> None:
    job_id = await submitted(store, lane)
    for number in range(5):
        claim = await claimed(store, lane, lease_seconds=SHORT)
        assert (claim.job.id, claim.job.lost_count) == (job_id, number)
        if number < 3:
            await store.publish(lane, [publication(claim, delta("x", number))])
        await lapse()
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None
    record = await store.get(job_id)
    assert record is not None and (record.lost_count, record.stuck_count) == (5, 3)
    assert await store.dead_letters(lane) == [job_id]


async def test_a_sweep_buries_what_no_worker_comes_for(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    for _ in range(3):
        assert (await store.sweep(lane)).failed == []
        await claimed(store, lane, lease_seconds=SHORT)
        await lapse()
    assert (await store.sweep(lane)).failed == [job_id]
    assert (await store.sweep(lane)).failed == []


async def test_hand_over_goes_first_and_counts_no_loss(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    await store.publish(lane, [publication(claim, delta("a", 1))])
    waiting = await submitted(store, lane, tier=Tier.INTERACTIVE)
    assert await store.release(claim.hold, reason="hand_over")
    assert await store.release(claim.hold, reason="hand_over")  # its reply was lost, say
    record = await store.get(job_id)
    assert record is not None and (record.status, record.owner) == (Status.QUEUED, None)
    assert await store.renew(lane, [claim.hold], lease_seconds=LEASE) == [claim.hold]
    again = await claimed(store, lane, "worker-2")
    assert (again.job.id, again.job.attempt, again.job.lost_count) == (job_id, 2, 0)
    assert types(await check_log(store, job_id)) == ["queued", "started", "delta", "requeued", "started"]
    assert again.history[-1].body.reason == "hand_over"
    assert not await store.release(claim.hold, reason="hand_over")  # too late: the next attempt runs
    assert (await claimed(store, lane)).job.id == waiting


async def test_a_delayed_retry_waits_for_its_time(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    assert await store.release(claim.hold, reason="retry", delay_seconds=SHORT)
    assert sum((await store.load(lane)).waiting.values()) == 1
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None
    await lapse()
    assert (await claimed(store, lane)).job.id == job_id


# --- publishing ---


async def test_published_deltas_are_numbered_on(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    assert await store.publish(lane, [publication(claim, delta("a", 1), delta("b", 2))]) == []
    assert await store.publish(lane, [publication(claim, delta("c", 3))]) == []
    events = await check_log(store, job_id)
    assert types(events) == ["queued", "started", "delta", "delta", "delta"]
    assert [event.body for event in events[2:]] == [delta("a", 1), delta("b", 2), delta("c", 3)]
    assert [event.sequence_number for event in await store.events(job_id, after=2)] == [3, 4]
    assert [event.sequence_number for event in await store.events(job_id, after=0, limit=2)] == [1, 2]
    assert await store.events(job_id, after=4) == []


async def test_a_repeated_publication_is_written_once(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    first = claim.job.num_events
    once = publication(claim, delta("a", 1), delta("b", 2), first_number=first)
    for _ in range(3):
        assert await store.publish(lane, [once]) == []
    # A later one may overlap with what is there.
    assert await store.publish(lane, [publication(claim, delta("b", 2), delta("c", 3), first_number=first + 1)]) == []
    events = await check_log(store, job_id)
    assert "".join(d.text for event in events for d in event.body.deltas) == "abc"
    cancelled = await store.cancel(job_id)
    assert cancelled is not None and cancelled.outcome is not None
    assert cancelled.outcome.usage.completion_tokens == 3


async def test_a_gap_is_refused_and_nothing_written(store: JobStore, lane: int) -> None:
    job_id, other_id = await submitted(store, lane), await submitted(store, lane)
    other, claim = await claimed(store, lane), await claimed(store, lane)
    gap = publication(claim, delta("b", 2), first_number=claim.job.num_events + 1)
    with pytest.raises(Conflict, match="gap"):
        await store.publish(lane, [publication(other, delta("a", 1)), gap])
    with pytest.raises(Conflict, match="gap"):
        await store.commit(claim.hold, success(), last=gap)
    with pytest.raises(Conflict, match="gap"):  # nothing to add, and still the log must be where its holder left it
        await store.commit(claim.hold, success(), last=publication(claim, first_number=claim.job.num_events + 1))
    assert len(await store.events(job_id)) == len(await store.events(other_id)) == 2


# --- ends ---


async def test_a_commit_that_adds_nothing_names_where_the_log_stands(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    assert await store.publish(lane, [publication(claim, delta("a", 1), first_number=claim.job.num_events)]) == []
    for _ in range(2):
        assert await store.commit(
            claim.hold, success("a", 1), last=publication(claim, first_number=claim.job.num_events + 1)
        )
    assert types(await check_log(store, job_id)) == ["queued", "started", "delta", "succeeded"]


async def test_commit_ends_a_job_once(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    last = publication(claim, delta("done", 1, 2, finish_reason="stop"), first_number=claim.job.num_events)
    for _ in range(2):  # a repeated commit is the same commit
        assert await store.commit(claim.hold, success("done", 1, 2), last=last)
    record = await store.get(job_id)
    assert record is not None and record.finished_ms is not None
    assert (record.status, record.outcome, record.owner) == (Status.SUCCEEDED, success("done", 1, 2), None)
    events = await check_log(store, job_id)
    assert types(events) == ["queued", "started", "delta", "succeeded"]
    assert events[-1].body == EventBody(attempt=1, usage=success("done", 1, 2).usage)
    load = await store.load(lane)
    assert (load.running, sum(load.waiting.values())) == (0, 0)
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None
    assert await store.publish(lane, [publication(claim, delta("more", 3))]) == [claim.hold]
    assert await store.renew(lane, [claim.hold], lease_seconds=LEASE) == [claim.hold]


async def test_a_failure_says_why(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    error = JobError(code="context_length_exceeded", message="too long", param="prompt")
    outcome = Outcome(status=Status.FAILED, error=error)
    assert await store.commit(claim.hold, outcome)
    record = await store.get(job_id)
    assert record is not None and record.outcome == outcome
    assert (await check_log(store, job_id))[-1].body.error == error


async def test_an_outcome_must_be_an_end(store: JobStore, lane: int) -> None:
    await submitted(store, lane)
    claim = await claimed(store, lane)
    with pytest.raises(ValueError, match="no end"):
        await store.commit(claim.hold, Outcome(status=Status.RUNNING))
    assert await store.commit(claim.hold, success())


async def test_cancel_of_a_queued_job(store: JobStore, lane: int) -> None:
    job_id, next_id = await submitted(store, lane), await submitted(store, lane)
    cancelled = await store.cancel(job_id)
    assert cancelled is not None and cancelled.outcome == Outcome(status=Status.CANCELLED)
    assert await store.cancel(job_id) == cancelled == await store.get(job_id)
    assert types(await check_log(store, job_id)) == ["queued", "cancelled"]
    assert await store.position(next_id) == 0
    assert (await claimed(store, lane)).job.id == next_id


async def test_cancel_of_a_running_job_keeps_what_was_published(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    await store.publish(lane, [publication(claim, delta("Hel", 1), delta("lo", 2, 3))])
    cancelled = await store.cancel(job_id)
    assert cancelled is not None and cancelled.outcome is not None and cancelled.outcome.result is not None
    choice = cancelled.outcome.result.choices[0]
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("Hello", [1, 2, 3], None)
    assert cancelled.outcome.usage == Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
    assert await store.publish(lane, [publication(claim, delta("!", 4))]) == [claim.hold]
    assert not await store.commit(claim.hold, success())
    events = await check_log(store, job_id)
    assert types(events) == ["queued", "started", "delta", "delta", "cancelled"]
    assert events[-1].body.usage == cancelled.outcome.usage
    assert (await store.load(lane)).running == 0


async def test_cancel_while_the_log_grows_misses_nothing(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)

    async def publish() -> None:
        token = 0
        while not await store.publish(lane, [publication(claim, delta(f"{token} ", token))]):
            token += 1
            await asyncio.sleep(0)

    publishing = asyncio.create_task(publish())
    await asyncio.sleep(0.02)
    cancelled = await store.cancel(job_id)
    await publishing
    assert cancelled is not None and cancelled.outcome is not None and cancelled.outcome.result is not None
    tokens = [t for event in await store.events(job_id, limit=10**6) for d in event.body.deltas for t in d.token_ids]
    assert cancelled.outcome.result.choices[0].token_ids == tokens == list(range(len(tokens)))
    assert cancelled.outcome.usage.completion_tokens == len(tokens)


async def test_cancel_after_the_end_changes_nothing(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    assert await store.commit((await claimed(store, lane)).hold, success())
    record = await store.get(job_id)
    assert await store.cancel(job_id) == record


async def test_delete_forgets_only_what_has_ended(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane)
    with pytest.raises(Conflict, match="queued"):
        await store.delete(job_id)
    claim = await claimed(store, lane)
    with pytest.raises(Conflict, match="running"):
        await store.delete(job_id)
    assert await store.commit(claim.hold, success())
    assert await store.delete(job_id)
    assert not await store.delete(job_id)
    assert await store.get(job_id) is None
    assert await store.list_jobs("default", limit=10) == []
    with pytest.raises(UnknownJob):
        await store.events(job_id)


async def test_what_waits_too_long_expires_at_a_claim(store: JobStore, lane: int) -> None:
    late = [await submitted(store, lane, queue_ttl_ms=20) for _ in range(3)]
    good = await submitted(store, lane)
    await lapse()
    assert (await claimed(store, lane)).job.id == good
    for job_id in late:
        record = await store.get(job_id)
        assert record is not None and record.status is Status.EXPIRED
        assert types(await check_log(store, job_id)) == ["queued", "expired"]
    assert await store.claim(lane, "w", free_tokens=None, lease_seconds=LEASE) is None


async def test_a_started_job_outlives_its_queue_time(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane, queue_ttl_ms=ENOUGH_MS)
    claim = await claimed(store, lane)
    await asyncio.sleep(1.2 * ENOUGH_MS / 1000)
    assert (await store.sweep(lane)).expired == []
    assert await store.release(claim.hold, reason="retry")
    assert (await claimed(store, lane)).job.id == job_id


async def test_a_sweep_expires_running_jobs_past_their_deadline(store: JobStore, lane: int) -> None:
    probe = await store.get(await submitted(store, lane))
    assert probe is not None
    await store.cancel(probe.id)
    job_id = await submitted(store, lane, deadline_ms=probe.created_ms + ENOUGH_MS)
    claim = await claimed(store, lane)
    await store.publish(lane, [publication(claim, delta("a", 1))])
    await asyncio.sleep(1.2 * ENOUGH_MS / 1000)
    assert (await store.sweep(lane)).expired == [job_id]
    assert (await store.sweep(lane)).expired == []
    record = await store.get(job_id)
    assert record is not None and record.outcome is not None
    assert (record.status, record.outcome.usage.completion_tokens) == (Status.EXPIRED, 1)
    assert not await store.commit(claim.hold, success())
    assert types(await check_log(store, job_id))[-1] == "expired"


async def test_an_attempt_may_not_run_too_long(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane, attempt_timeout_ms=20)
    await claimed(store, lane)
    await lapse()
    assert (await store.sweep(lane)).failed == [job_id]
    record = await store.get(job_id)
    assert record is not None and record.outcome is not None and record.outcome.error is not None
    assert (record.status, record.outcome.error.code) == (Status.FAILED, "attempt_timeout")


async def test_waiting_between_attempts_is_no_attempt(store: JobStore, lane: int) -> None:
    job_id = await submitted(store, lane, attempt_timeout_ms=20)
    assert await store.release((await claimed(store, lane)).hold, reason="retry")
    await lapse()
    assert (await store.sweep(lane)).failed == []
    assert (await claimed(store, lane)).job.id == job_id


# --- honest waiting ---


async def test_positions_count_the_jobs_ahead(store: JobStore, lane: int) -> None:
    ids = [await submitted(store, lane) for _ in range(4)]
    other = await submitted(store, lane, tier=Tier.BULK)
    assert [await store.position(job_id) for job_id in ids] == [0, 1, 2, 3]
    assert await store.position(other) == 0
    claim = await claimed(store, lane)
    assert [await store.position(job_id) for job_id in ids] == [None, 0, 1, 2]
    await store.cancel(ids[2])
    assert [await store.position(job_id) for job_id in ids] == [None, 0, None, 1]
    assert await store.release(claim.hold, reason="hand_over")
    assert [await store.position(job_id) for job_id in ids] == [0, 1, None, 2]


# --- the outbox ---


async def test_every_end_tells_the_webhook_that_asked(store: JobStore, lane: int) -> None:
    hook = Webhook(url="https://example.com/hook")
    await submitted(store, lane)  # asks for nothing
    assert await store.commit((await claimed(store, lane)).hold, success())
    job_id = await submitted(store, lane, webhook=hook)
    assert await store.take_notices(lane, limit=10, hide_seconds=60) == []
    assert await store.commit((await claimed(store, lane)).hold, success())
    (notice,) = await store.take_notices(lane, limit=10, hide_seconds=60)
    assert (notice.job_id, notice.lane, notice.topic, notice.event) == (job_id, lane, "webhook", "job.succeeded")
    assert (notice.webhook, notice.run_item, notice.tries) == (hook, None, 1)
    assert notice.sequence_number == (await store.events(job_id))[-1].sequence_number
    assert notice.traceparent == new_job(lane).traceparent


async def test_a_webhook_is_told_only_what_it_names(store: JobStore, lane: int) -> None:
    hook = Webhook(url="https://example.com/hook", events=["job.started", "job.failed"])
    job_id = await submitted(store, lane, webhook=hook)
    claim = await claimed(store, lane)
    assert await store.release(claim.hold, reason="retry")
    claim = await claimed(store, lane)  # a second attempt is no second start
    assert await store.commit(claim.hold, success())
    assert [(n.job_id, n.event) for n in await store.take_notices(lane, limit=9, hide_seconds=60)] == [
        (job_id, "job.started")
    ]


async def test_a_child_of_a_run_tells_its_run(store: JobStore, lane: int) -> None:
    item = RunItem(run_id="run-1", item_id="map-3")
    job_id = await submitted(store, lane, run_item=item, webhook=Webhook(url="https://example.com"))
    await store.cancel(job_id)
    notices = await store.take_notices(lane, limit=10, hide_seconds=60)
    assert sorted((n.topic, n.event) for n in notices) == [("run", "job.cancelled"), ("webhook", "job.cancelled")]
    assert [n.run_item for n in notices if n.topic == "run"] == [item]
    assert len({n.id for n in notices}) == 2


async def test_a_notice_returns_until_it_is_deleted(store: JobStore, lane: int) -> None:
    await submitted(store, lane, webhook=Webhook(url="https://example.com"))
    assert await store.commit((await claimed(store, lane)).hold, success())
    (first,) = await store.take_notices(lane, limit=10, hide_seconds=SHORT)
    assert await store.take_notices(lane, limit=10, hide_seconds=60) == []
    await lapse()
    (second,) = await store.take_notices(lane, limit=10, hide_seconds=60)
    assert (second.id, second.tries) == (first.id, 2)
    await store.delay_notice(second, delay_seconds=0)
    (third,) = await store.take_notices(lane, limit=10, hide_seconds=0)
    await store.delete_notice(third)
    await store.delay_notice(third, delay_seconds=0)  # a late relay brings nothing back
    assert await store.take_notices(lane, limit=10, hide_seconds=0) == []


async def test_each_notice_is_taken_by_one_of_many(store: JobStore, lane: int) -> None:
    for _ in range(20):
        await store.cancel(await submitted(store, lane, webhook=Webhook(url="https://example.com")))
    shares = await asyncio.gather(*(store.take_notices(lane, limit=7, hide_seconds=60) for _ in range(4)))
    taken = [notice.id for share in shares for notice in share]
    assert len(taken) == len(set(taken)) == 20


# --- waiting ---


async def test_waiting_rings_for_new_work(store: JobStore, lane: int) -> None:
    assert await store.wait_for_work([lane], timeout=30) == set()  # notes where the lane stands, returns at once
    waiting = asyncio.create_task(store.wait_for_work([lane], timeout=30))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await submitted(store, lane)
    assert await asyncio.wait_for(waiting, 10) == set()
    await claimed(store, lane)


async def test_work_between_two_waits_is_not_missed(store: JobStore, lane: int) -> None:
    await store.wait_for_work([lane], timeout=30)
    await submitted(store, lane)
    await asyncio.wait_for(store.wait_for_work([lane], timeout=30), 10)


async def test_waiting_ends_when_the_time_is_up(store: JobStore, lane: int) -> None:
    await store.wait_for_work([lane], timeout=0)
    assert await asyncio.wait_for(store.wait_for_work([lane], timeout=0.02), 10) == set()
    await store.wait_for_events([lane], timeout=0)
    assert await asyncio.wait_for(store.wait_for_events([lane], timeout=0.02), 10) == set()
    assert await asyncio.wait_for(store.wait_for_work([], timeout=0.02), 10) == set()
    assert await asyncio.wait_for(store.wait_for_events([], timeout=0.02), 10) == set()


async def test_waiting_names_running_jobs_that_were_ended(store: JobStore, lane: int) -> None:
    queued, running = await submitted(store, lane), await submitted(store, lane)
    await claimed(store, lane)
    await store.wait_for_work([lane], timeout=0)
    await store.cancel(queued)  # the first in the queue, which runs
    await store.cancel(running)  # not started: no worker needs to know
    assert await asyncio.wait_for(store.wait_for_work([lane], timeout=30), 10) == {queued}


async def test_waiting_ends_when_a_lease_lapses(store: JobStore, lane: int) -> None:
    await submitted(store, lane)
    await claimed(store, lane, lease_seconds=0.2)
    await store.wait_for_work([lane], timeout=0)
    await asyncio.wait_for(store.wait_for_work([lane], timeout=60), 10)
    assert (await claimed(store, lane)).job.attempt == 2


async def test_waiting_rings_for_a_hand_over(store: JobStore, lane: int) -> None:
    await submitted(store, lane)
    claim = await claimed(store, lane)
    await store.wait_for_work([lane], timeout=0)
    waiting = asyncio.create_task(store.wait_for_work([lane], timeout=60))
    await asyncio.sleep(0.02)
    await store.release(claim.hold, reason="hand_over")
    await asyncio.wait_for(waiting, 10)
    assert (await claimed(store, lane)).job.attempt == 2


async def test_waiting_names_jobs_whose_logs_grew(store: JobStore, lane: int) -> None:
    other_lane = await store.open_lane("other")
    lanes = [lane, other_lane]
    first = await submitted(store, lane)
    assert await store.wait_for_events(lanes, timeout=30) == set()
    second = await submitted(store, other_lane)
    assert await asyncio.wait_for(store.wait_for_events(lanes, timeout=30), 10) == {second}
    claim = await claimed(store, lane)
    assert await asyncio.wait_for(store.wait_for_events(lanes, timeout=30), 10) == {first}
    waiting = asyncio.create_task(store.wait_for_events(lanes, timeout=30))
    await asyncio.sleep(0.02)
    await store.publish(lane, [publication(claim, delta("a", 1))])
    assert await asyncio.wait_for(waiting, 10) == {first}


# --- settings ---


async def _short_lived(store_url: str, settings: QueueSettings) -> JobStore:
    if store_url == "memory":
        return MemoryJobs(settings=settings)
    return await RedisJobs.connect(store_url, settings=settings)


async def test_a_log_goes_before_its_record(store_url: str) -> None:
    store = await _short_lived(store_url, QueueSettings(event_log_seconds=0.02))
    lane = await store.open_lane(ALIAS)
    job_id = await submitted(store, lane)
    claim = await claimed(store, lane)
    await lapse()
    assert len(await store.events(job_id)) == 2  # a log stays as long as the job lives
    assert await store.commit(claim.hold, success())
    await lapse()
    with pytest.raises(EventsGone):
        await store.events(job_id)
    record = await store.get(job_id)
    assert record is not None and record.outcome == success()
    assert await store.events(job_id, after=record.num_events - 1) == []  # who has all misses nothing
    assert await store.cancel(job_id) == record
    await store.close()


async def test_a_record_goes_at_last(store_url: str) -> None:
    store = await _short_lived(store_url, QueueSettings(record_seconds=0.02, event_log_seconds=0.02))
    lane = await store.open_lane(ALIAS)
    job_id = await submitted(store, lane)
    assert await store.commit((await claimed(store, lane)).hold, success())
    await lapse()
    assert await store.get(job_id) is None
    assert await store.list_jobs("default", limit=10) == []
    with pytest.raises(UnknownJob):
        await store.events(job_id)
    await store.close()


async def test_a_head_that_stood_too_long_goes_first(store_url: str) -> None:
    store = await _short_lived(store_url, QueueSettings(patience_seconds=0.1))
    lane = await store.open_lane(ALIAS)
    bulk = await submitted(store, lane, tier=Tier.BULK)
    await asyncio.sleep(1.0)  # past the bulk tier's patience, eight times 100 ms
    await submitted(store, lane, tier=Tier.INTERACTIVE)
    assert (await claimed(store, lane)).job.id == bulk
    await store.close()


async def test_a_big_head_that_stood_too_long_is_not_overtaken(store_url: str) -> None:
    store = await _short_lived(store_url, QueueSettings(patience_seconds=0.01))
    lane = await store.open_lane(ALIAS)
    big = await submitted(store, lane, cost_tokens=500)
    small = await submitted(store, lane, tier=Tier.BULK, cost_tokens=1)
    claim = await store.claim(lane, "w", free_tokens=100, lease_seconds=LEASE)
    assert claim is None or claim.job.id == small  # at first, if the machine is quick
    await lapse()
    await submitted(store, lane, tier=Tier.INTERACTIVE, cost_tokens=1)
    assert await store.claim(lane, "w", free_tokens=100, lease_seconds=LEASE) is None
    claim = await store.claim(lane, "w", free_tokens=500, lease_seconds=LEASE)
    assert claim is not None and claim.job.id == big
    await store.close()


async def test_a_big_retry_that_waited_too_long_is_not_overtaken(store_url: str) -> None:
    store = await _short_lived(store_url, QueueSettings(patience_seconds=0.02))
    lane = await store.open_lane(ALIAS)
    big = await submitted(store, lane, cost_tokens=500)
    assert await store.release((await claimed(store, lane)).hold, reason="retry")
    await lapse()
    await submitted(store, lane, cost_tokens=1)
    assert await store.claim(lane, "w", free_tokens=100, lease_seconds=LEASE) is None
    assert (await claimed(store, lane)).job.id == big
    await store.close()


async def test_an_idempotency_key_is_free_again_in_time(store_url: str) -> None:
    store = await _short_lived(store_url, QueueSettings(idempotency_seconds=0.02))
    await store.claim_key("tenant", "jobs", "key", "body-1", "job-1-aaaaaaaa")
    await lapse()
    assert await store.claim_key("tenant", "jobs", "key", "body-2", "job-1-bbbbbbbb") == "job-1-bbbbbbbb"
    await store.close()
