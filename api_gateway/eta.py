"""How long a queue takes: pure arithmetic over what was measured. Nothing measured, nothing claimed.

All workers of an alias are taken as one pool of seats. A seat is free now, or when the sequence in it has drawn what it
is expected to draw. Waiting jobs take seats in order; each keeps its seat for a turn, and its prompt is computed before
its first token, while everyone waits:

    seat 0  |== running ==|=== job 0 ===|=== job 3 ===|       a turn: expected output * seconds per token
    seat 1  |===== running =====|=== job 1 ===| job 4 |
    seat 2  |======= running =======|=== job 2 ===|

Where outputs end at random (`Sizes.spread` 1), seats do not come free in steps but steadily: then the same seats are
reckoned to come free one after the other, evenly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heapreplace

from msgspec import Struct

from infra.contracts import ModelCard, Pace, Tier, WorkerRecord
from infra.store import LaneLoad, Place
from infra.tiers import STRIDES
from infra.work import Sizes, Work

UNMEASURED_JOB_SECONDS = 1.0  # of work, for a job of which nothing is known
LEAST_BACKLOG_SECONDS = 1.0  # of any work at all, so that no work looks like none
LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 60.0
ENOUGH_SIZES = 8  # finished jobs from which on their lengths tell of those to come


@dataclass(frozen=True)  # without slots: what follows from the facts is reckoned once
class Facts:
    """What is known of an alias's queue at one moment: any gateway reads the same."""

    loads: Mapping[int, LaneLoad]  # by lane
    workers: Sequence[WorkerRecord]
    pace: Pace | None  # of the card: what was measured last, by whichever worker
    cold_start_seconds: float = 0.0
    max_workers: int | None = None  # None: as many as run
    num_unfed: int = 0  # items of runs that are not in the queue yet

    @cached_property
    def live(self) -> list[WorkerRecord]:
        """Workers that take jobs."""
        return [worker for worker in self.workers if worker.takes_jobs]

    @cached_property
    def num_waiting(self) -> int:
        return sum(load.num_waiting for load in self.loads.values())

    @cached_property
    def num_running(self) -> int:
        return sum(load.running for load in self.loads.values())

    @property
    def num_delayed(self) -> int:
        return sum(load.delayed for load in self.loads.values())

    @cached_property
    def waiting_work(self) -> Work:
        return sum((work for load in self.loads.values() for work in load.work.values()), Work())

    @cached_property
    def sizes(self) -> Sizes:
        return sum((load.sizes for load in self.loads.values()), Sizes())

    @cached_property
    def pools(self) -> dict[tuple[int | None, bool], Pool | None]:
        """What `pool_of` made of these facts, by its other arguments."""
        return {}

    @property
    def is_idle(self) -> bool:
        return not (self.num_waiting or self.num_running or self.num_unfed)


class Ahead(Struct, frozen=True):
    """Jobs that are served before one, and what they ask for."""

    jobs: float = 0.0
    work: Work = Work()

    def __add__(self, other: Ahead) -> Ahead:
        return Ahead(self.jobs + other.jobs, self.work + other.work)


def pace_of_card(card: ModelCard) -> Pace | None:
    """What the card says, also one that an earlier release wrote, of rates alone; None until measured."""
    if card.pace is not None or not card.prefill_tokens_per_s or not card.decode_tokens_per_s:
        return card.pace
    return Pace(
        seconds_per_step=0.0,
        seconds_per_output_token=1 / card.decode_tokens_per_s,
        seconds_per_prompt_token=1 / card.prefill_tokens_per_s,
        num_seats=1,
        kv_tokens=card.max_model_len,
    )


def measured_pace(facts: Facts) -> Pace | None:
    """The mean of the live workers', or else the card's."""
    paces = [worker.pace for worker in facts.live if worker.pace is not None]
    if not paces:
        return facts.pace
    return Pace(
        seconds_per_step=sum(pace.seconds_per_step for pace in paces) / len(paces),
        seconds_per_output_token=sum(pace.seconds_per_output_token for pace in paces) / len(paces),
        seconds_per_prompt_token=sum(pace.seconds_per_prompt_token for pace in paces) / len(paces),
        num_seats=round(sum(pace.num_seats for pace in paces) / len(paces)),
        kv_tokens=round(sum(pace.kv_tokens for pace in paces) / len(paces)),
    )


def token_seconds(pace: Pace, batch: float) -> float:
    """Seconds per token of one sequence among `batch`."""
    return pace.seconds_per_step + batch * pace.seconds_per_output_token


@dataclass(frozen=True)  # without slots, as above
class Pool:
    """The seats of all workers, as if they were one."""

    pace: Pace
    sizes: Sizes
    num_workers: int
    free_in: tuple[float, ...]  # seconds until each seat is free, ascending; never empty
    spread: float  # how evenly seats come free: 0 in steps, 1 evenly
    batch: float  # sequences that each worker runs while the queue is worked off
    pending_seconds: float  # of prompts that are computed before those of the waiting

    def claim_seconds(self, ahead: Ahead) -> float:
        """When a seat is free for the job behind those."""
        output_tokens = ahead.work.output_tokens / ahead.jobs if ahead.jobs else 0.0
        turn = output_tokens * self.sizes.output_share * token_seconds(self.pace, self.batch)
        in_steps, evenly = self._in_steps(ahead.jobs, turn), self._evenly(ahead.jobs, turn)
        decoding = in_steps + self.spread * (evenly - in_steps)
        return decoding + self.pending_seconds + self._prompt_seconds(ahead.work.prompt_tokens) / self.num_workers

    def first_token_seconds(self, ahead: Ahead, own_prompt_tokens: float) -> float:
        return self.claim_seconds(ahead) + self._prompt_seconds(own_prompt_tokens) + self.pace.seconds_per_step

    def _in_steps(self, jobs_ahead: float, turn: float) -> float:
        seats, place = len(self.free_in), math.floor(jobs_ahead)
        return min(self.free_in[place % seats], self.free_in[0] + turn) + (place // seats) * turn

    def _evenly(self, jobs_ahead: float, turn: float) -> float:
        num_taken, mean_seconds = self._taken
        num_awaited = max(0.0, jobs_ahead + 1 - (len(self.free_in) - num_taken))
        first_turns = min(num_awaited, num_taken) * mean_seconds
        return (first_turns + max(0.0, num_awaited - num_taken) * turn) / len(self.free_in)

    @cached_property
    def _taken(self) -> tuple[int, float]:
        """Seats that are taken, and seconds until they are free, on average."""
        taken = [seconds for seconds in self.free_in if seconds > 0]
        return len(taken), sum(taken) / max(1, len(taken))

    def _prompt_seconds(self, tokens: float) -> float:
        return tokens * self._each_prompt_token_seconds

    @cached_property
    def _each_prompt_token_seconds(self) -> float:
        return self.sizes.computed_share * self.pace.seconds_per_prompt_token


def pool_of(facts: Facts, *, num_running: int | None = None, with_max_workers: bool = False) -> Pool | None:
    """The pool that works off the queue. None where nothing was measured.

    Without any worker, it is the first one to come, after a cold start; with `max_workers`, all that may come.
    `num_running` is a newer count of the jobs that run than that of the facts.
    """
    key = num_running, with_max_workers
    if key not in facts.pools:
        facts.pools[key] = _pool_of(facts, num_running=num_running, with_max_workers=with_max_workers)
    return facts.pools[key]


def _pool_of(facts: Facts, *, num_running: int | None, with_max_workers: bool) -> Pool | None:
    pace = measured_pace(facts)
    if pace is None:
        return None
    sizes, live, typical = facts.sizes, facts.live, _typical(facts) or Work()
    num_cold = max(0 if live else 1, (facts.max_workers or 0) - len(live) if with_max_workers else 0)
    waiting_each = facts.num_waiting / (len(live) + num_cold)
    rooms = [_room(worker, pace, sizes, typical, waiting_each) for worker in live]
    cold_seats = _seats(pace, typical, pace.kv_tokens)
    batches = [room.batch for room in rooms] + [min(cold_seats, waiting_each)] * num_cold
    batch = max(1.0, sum(batches) / len(batches))
    turn = typical.output_tokens * sizes.output_share * token_seconds(pace, batch)

    # Jobs that run and that no worker has told of: claimed since, or left behind by a worker that is gone and served
    # before all others. Each takes the seat that is free first.
    num_told = sum(worker.num_jobs for worker in facts.workers) - sum(room.num_ended for room in rooms)
    num_untold = max(0, (facts.num_running if num_running is None else num_running) - num_told)
    age = max((worker.age_ms for worker in live), default=0) / 1000
    # What is called infeasible must be so: where outputs end at random, seats may come free at once.
    luck = 1 - sizes.spread if with_max_workers else 1.0
    free_in = [seconds * luck for room in rooms for seconds in room.free_in]
    free_in += [facts.cold_start_seconds] * (num_cold * cold_seats)
    heapify(free_in)
    for _ in range(num_untold):
        heapreplace(free_in, free_in[0] + max(turn / 2, turn - age / 2))

    prompt_tokens = sum(room.prompt_tokens for room in rooms) + num_untold * typical.prompt_tokens
    num_workers = len(live) + num_cold
    return Pool(
        pace=pace,
        sizes=sizes,
        num_workers=num_workers,
        free_in=tuple(sorted(free_in)),
        spread=0.0 if num_cold or with_max_workers else sizes.spread,
        batch=batch,
        pending_seconds=sizes.expected(Work(prompt_tokens)).prompt_tokens * pace.seconds_per_prompt_token / num_workers,
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """One worker's seats, as they are now and not when it told of them."""

    free_in: list[float]
    batch: float
    prompt_tokens: float  # to be computed before the first of those that wait
    num_ended: int  # sequences that should have ended since


def _room(worker: WorkerRecord, pace: Pace, sizes: Sizes, typical: Work, waiting: float) -> _Room:
    pace, age, taken = worker.pace or pace, worker.age_ms / 1000, len(worker.remaining)
    num_free = min(max(0, worker.num_seats - taken), _seats(pace, typical, worker.free_tokens, at_least=not taken))
    batch = min(taken + num_free, taken + waiting)
    each = sizes.output_share * token_seconds(pace, batch)
    left = [max(0.0, tokens * each - age) for tokens in worker.remaining]
    each_prompt_token = sizes.expected(Work(1)).prompt_tokens * pace.seconds_per_prompt_token
    computed_since = age / each_prompt_token if each_prompt_token else worker.prompt_tokens
    return _Room(
        free_in=[0.0] * num_free + left,
        batch=batch,
        prompt_tokens=max(0.0, worker.prompt_tokens - computed_since),
        num_ended=sum(seconds == 0 for seconds in left),
    )


def ahead_of(facts: Facts, lane: int, tier: Tier, place: Place) -> Ahead:
    """What is served before a job in that place: those ahead in its tier, other tiers by their weight, other lanes in
    turn with its own."""
    before = Ahead(place.position, place.ahead)
    for other, stride in STRIDES.items():
        if other is not tier and lane in facts.loads:
            before += _first(facts.loads[lane], other, (place.position + 0.5) * STRIDES[tier] / stride)
    own_jobs = before.jobs
    for number, load in facts.loads.items():
        if number != lane and not load.paused:
            for other in STRIDES:
                before += _first(load, other, own_jobs * load.waiting[other] / max(1, load.num_waiting))
    return before


def place_in_pool(facts: Facts, lane: int, tier: Tier, place: Place) -> Place:
    """A job's place among the jobs of its tier in all lanes: workers take the lanes in turn, so about as many jobs go
    ahead from each other lane as from its own."""
    ahead = Ahead(place.position, place.ahead)
    for number, load in facts.loads.items():
        if number != lane and not load.paused:
            ahead += _first(load, tier, place.position)
    return Place(round(ahead.jobs), ahead.work, facts.num_running)


def eta_seconds(facts: Facts, lane: int, tier: Tier, place: Place, own: Work) -> float | None:
    """When the first token of a waiting job may come; None while nothing was measured, or where its lane is paused."""
    num_elsewhere = sum(load.running for number, load in facts.loads.items() if number != lane)
    pool = pool_of(facts, num_running=place.running + num_elsewhere)
    if pool is None or (lane in facts.loads and facts.loads[lane].paused):
        return None
    return pool.first_token_seconds(ahead_of(facts, lane, tier, place), own.prompt_tokens)


def least_finish_seconds(facts: Facts, lane: int, tier: Tier, own: Work, *, least_output_tokens: int) -> float:
    """When a job that is submitted now could be finished at the earliest, if every worker that may come came at once.

    It draws `least_output_tokens` in any case, and as large a share of what it asks for as jobs did lately.
    """
    pool = pool_of(facts, with_max_workers=True)
    load = facts.loads.get(lane)
    if pool is None or load is None:
        return 0.0
    place = Place(load.waiting[tier], load.work[tier], load.running)
    share = facts.sizes.output_share if facts.sizes.jobs >= ENOUGH_SIZES else 0.0
    output_tokens = max(least_output_tokens, own.output_tokens * share)
    first = pool.first_token_seconds(ahead_of(facts, lane, tier, place), own.prompt_tokens)
    return first + max(0.0, output_tokens - 1) * token_seconds(pool.pace, 1)


def backlog_seconds(facts: Facts) -> float:
    """Worker-seconds of all work there is, running and not yet fed included; zero only where there is none."""
    if facts.is_idle:
        return 0.0
    pace, sizes, typical = measured_pace(facts), facts.sizes, _typical(facts)
    if pace is None:
        each = UNMEASURED_JOB_SECONDS
        return max(LEAST_BACKLOG_SECONDS, each * (facts.num_waiting + facts.num_running + facts.num_unfed))
    batch = _seats(pace, typical or Work(), pace.kv_tokens)

    def seconds(work: Work) -> float:
        work = sizes.expected(work)
        return (
            work.prompt_tokens * pace.seconds_per_prompt_token + work.output_tokens * token_seconds(pace, batch) / batch
        )

    told = Work(sum(one.prompt_tokens for one in facts.workers), sum(sum(one.remaining) for one in facts.workers))
    untold = max(0, facts.num_running - sum(worker.num_jobs for worker in facts.workers)) + facts.num_unfed
    each = seconds(typical) if typical is not None else UNMEASURED_JOB_SECONDS
    running = seconds(told) if facts.num_running else 0.0
    return max(LEAST_BACKLOG_SECONDS, seconds(facts.waiting_work) + running + untold * each)


def desired_workers(facts: Facts, *, seconds_per_worker: float) -> int:
    """Workers that would finish the backlog in the time; at least one where there is work, none where there is not."""
    if facts.is_idle:
        return 0
    wanted = max(1, math.ceil(backlog_seconds(facts) / seconds_per_worker))
    return wanted if facts.max_workers is None else min(wanted, max(1, facts.max_workers))


def retry_after_seconds(facts: Facts) -> float:
    """When the next waiting job leaves a full queue, so that a refused one may come in."""
    pool = pool_of(facts)
    wanted = LEAST_RETRY_SECONDS if pool is None else pool.claim_seconds(Ahead())
    return min(MOST_RETRY_SECONDS, max(LEAST_RETRY_SECONDS, wanted))


def _typical(facts: Facts) -> Work | None:
    """What a job asks for, on average over those that wait, else over those that finished lately; None: unknown."""
    if facts.num_waiting:
        return facts.waiting_work.times(1 / facts.num_waiting)
    return facts.sizes.mean


def _seats(pace: Pace, typical: Work, kv_tokens: float, *, at_least: bool = True) -> int:
    """How many typical jobs run at once in so many KV tokens; an idle worker takes any one job."""
    room = pace.num_seats if not typical.tokens else min(pace.num_seats, math.floor(kv_tokens / typical.tokens))
    return max(room, 1 if at_least else 0)


def _first(load: LaneLoad, tier: Tier, jobs: float) -> Ahead:
    """At most so many jobs of a tier, of its average."""
    num_waiting = load.waiting.get(tier, 0)
    jobs = min(jobs, num_waiting)
    return Ahead(jobs, load.work[tier].times(jobs / num_waiting)) if num_waiting else Ahead()
