"""Decides each step: who runs, on which tokens, in which blocks. Pure: no torch, no clock of its own, no I/O.

    add -> waiting --start--> prefilling --prompt done--> decoding --finish--> gone
              ^                    |                          |
              +---- preempted: recompute, or swapped out -----+

One step: `plan(now)`, the forward, `commit(plan, result)`; or `abandon(plan)` where the forward failed.
A plan spends one budget of tokens: every decoding sequence first (one token each), then prefill chunks in the policy's
order, then sequences that start. Where blocks run out, running work is preempted, the policy's last first; what a plan
preempts does not come back in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.finish import finish_of
from engine.plan import Plan, Row
from engine.roster import Roster
from engine.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.costs import StepCosts
    from engine.outputs import FinishReason
    from engine.plan import PositionLogprobs, Sampled, StepResult
    from engine.sequence import Request

_WATERMARK = 0.01  # share of the pool that a start leaves to running sequences


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        num_host_slots: int,
        max_model_len: int,
        costs: StepCosts,
    ) -> None:
        self.roster = Roster(
            config, num_blocks=num_blocks, num_host_slots=num_host_slots, max_model_len=max_model_len, costs=costs
        )
        self._config = config
        self._costs = costs
        self._needy: list[Row] = []  # decoding rows that may need a block before they go on
        self._step_index = 0
        self._in_flight: Plan | None = None
        self._has_preempted = False  # in the plan in the making

    # ---- requests come and go

    @property
    def num_requests(self) -> int:
        return len(self.roster.requests)

    @property
    def num_free_tokens(self) -> int:
        """Token slots that are neither held nor promised to what prefills or waits."""
        promised = self._num_promised_blocks() * self.roster.pool.block_size + self.roster.waiting.num_tokens
        return max(0, self.roster.pool.num_available * self.roster.pool.block_size - promised)

    def add(self, request: Request) -> None:
        """Queues a request. Sequences with emitted tokens go on behind them; those that these end are finished.

        Raises InvalidRequest for an id in use, and for a request that could never fit the pool, with the numbers.
        """
        self._check_idle()
        self.roster.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends all choices of a request with `abort` and frees its blocks at once; None where there is none."""
        self._check_idle()
        request = self.roster.requests.get(request_id)
        if request is not None:
            self.roster.drop_all(request, "abort")
        return request

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends one choice from outside, such as at a stop string; nothing happens where it has ended already.

        Before a request's choices fork they stand and fall together: abort it instead.
        """
        self._check_idle()
        if not sequence.is_finished and sequence.num_forks > 1:
            raise RuntimeError("a choice cannot end before its request forks")
        self.roster.drop(sequence, reason, stop_reason)

    # ---- one step

    def plan(self, now: float) -> Plan:
        """The next step, as plain data. `now` is in seconds, on the clock of the requests' arrival."""
        self._check_idle()
        self._step_index += 1
        self._has_preempted = False
        self._grow_decodes()
        budget = self._prefill_budget()
        chunks = self._chunk_prefills(budget)
        chunks += self._start_waiting(budget - sum(len(row.token_ids) for row in chunks), now)
        chunks = _running(chunks)  # some may have been preempted again
        decoding = self.roster.running.decoding
        copies, swap_out, swap_in = self.roster.tables.take_moves()
        plan = Plan(self._step_index, decoding + chunks, len(decoding), copies, swap_out, swap_in)
        self._in_flight = plan
        return plan

    def commit(self, plan: Plan, result: StepResult) -> None:
        """Takes the outcome of a plan: tokens are appended, blocks become findable, sequences fork and finish."""
        self._take_from_flight(plan)
        self.roster.tables.settle()
        decodes, chunks = plan.rows[: plan.num_decodes], plan.rows[plan.num_decodes :]
        samples = result.samples[: plan.num_decodes]
        if result.row_errors:
            for index, error in result.row_errors.items():
                self._fail_row(plan.rows[index], error)
            alive = [index for index, row in enumerate(decodes) if not row.sequence.is_finished]
            decodes, samples = [decodes[index] for index in alive], [samples[index] for index in alive]
        self._commit_decodes(decodes, samples)
        at = plan.num_decodes
        for index, row in enumerate(chunks, start=plan.num_decodes):
            if row.sequence.state is SequenceState.RUNNING:
                self._commit_chunk(row, result.samples[at : at + len(row.draws)], result.prompt_logprobs.get(index, []))
            at += len(row.draws)

    def abandon(self, plan: Plan) -> Plan:
        """The plan's execution failed somewhere: nothing of it is committed, and its block moves are undone.

        Sequences whose blocks it moved lose them and are computed again. Returns the rest as a plan without moves, to
        be executed at once, whole or in parts, and committed.
        """
        self._take_from_flight(plan)
        for sequence in self.roster.tables.abandon():
            self.roster.lose_blocks(sequence)
        decodes, chunks = _running(plan.rows[: plan.num_decodes]), _running(plan.rows[plan.num_decodes :])
        self._in_flight = Plan(plan.step_index, decodes + chunks, len(decodes))
        return self._in_flight

    def discard_plan(self) -> None:
        """Nothing came of the plan being executed, if there is one: its sequences are as they were before it."""
        if self._in_flight is not None:
            self.abandon(self._in_flight)
            self._in_flight = None

    def check_integrity(self) -> None:
        """Conservation of blocks and host slots, and agreement of the books; RuntimeError says what broke."""
        self.roster.check_integrity()

    # ---- planning

    def _grow_decodes(self) -> None:
        needy, self._needy = self._needy, []
        needy.sort(key=lambda row: row.sequence.order)
        for row in needy:
            sequence = row.sequence
            while sequence.state is SequenceState.RUNNING:
                if self.roster.tables.try_grow(sequence, row.start + 1):
                    self._note_next_check(sequence)
                    break
                self._preempt(self.roster.running.last())

    def _note_next_check(self, sequence: Sequence) -> None:
        """Until so many tokens are computed, a decoding sequence neither fills its block nor ends by length."""
        sequence.check_at = len(sequence.block_table) * self.roster.pool.block_size
        max_tokens = sequence.params.max_tokens
        if max_tokens is not None:
            sequence.check_at = min(sequence.check_at, sequence.num_prompt_tokens + max_tokens - 1)

    def _prefill_budget(self) -> int:
        budget = self._config.max_num_batched_tokens - len(self.roster.running.decoding)
        if self.roster.running.decoding and self._config.max_step_seconds is not None:
            within = self._costs.num_prefill_tokens_within(self._config.max_step_seconds)
            if within is not None:
                return min(budget, max(within, self.roster.pool.block_size))  # prefill is slowed, never stopped
        return budget

    def _chunk_prefills(self, budget: int) -> list[Row]:
        rows = []
        for sequence in self.roster.running.prefilling.copy():
            if budget > 0 and sequence.state is SequenceState.RUNNING:
                row = self._try_chunk(sequence, budget)
                if row is not None:
                    rows.append(row)
                    budget -= len(row.token_ids)
        return rows

    def _start_waiting(self, budget: int, now: float) -> list[Row]:
        rows = []
        while budget > 0:
            sequence = self._try_start(now)
            row = self._try_chunk(sequence, budget) if sequence is not None else None
            if row is None:
                break
            rows.append(row)
            budget -= len(row.token_ids)
        return rows

    def _try_chunk(self, sequence: Sequence, budget: int) -> Row | None:
        """The sequence's next chunk of at most `budget` tokens; None where no block can be had for it now."""
        start, target = sequence.num_computed_tokens, sequence.target
        end = min(target, start + budget)
        while not self.roster.tables.try_grow(sequence, end):
            victim = self.roster.running.last()
            if victim is sequence:
                return None  # it keeps what it has until those before it are done
            self._preempt(victim)
        draws = sequence.draws if end == target else []
        num_logits = max(1 if draws else 0, _num_prompt_logits(sequence, start, end))
        return Row(sequence, start, sequence.tokens(start, end), sequence.block_table, num_logits, draws)

    def _try_start(self, now: float) -> Sequence | None:
        """Starts the sequence that goes first, if there is a seat and room; the policy may preempt for it."""
        sequence = self.roster.waiting.peek()
        if sequence is None or (self._has_preempted and sequence.state is not SequenceState.WAITING):
            return None
        target = sequence.target
        while not (
            self.roster.running.has_seats_for(sequence)
            and self.roster.tables.try_start(sequence, target, spare=self._num_spare_blocks())
        ):
            victim = self._yielding_to(sequence, target)
            if victim is None:
                return None
            self._preempt(victim)
        return self.roster.start(now)

    def _num_spare_blocks(self) -> int:
        """Blocks that a start must leave: what prefilling sequences were promised, and a watermark while any runs."""
        watermark = int(_WATERMARK * self.roster.pool.num_blocks) if len(self.roster.running) else 0
        return self._num_promised_blocks() + watermark

    def _num_promised_blocks(self) -> int:
        """Blocks that prefilling sequences will still need for the tokens they have."""
        return sum(
            max(0, self.roster.pool.num_blocks_for(sequence.target) - len(sequence.block_table))
            for sequence in self.roster.running.prefilling
        )

    def _yielding_to(self, sequence: Sequence, target: int) -> Sequence | None:
        """The running sequence to preempt for a waiting one; None where the policy has none, or all are not enough."""
        if not self.roster.policy.preempts:
            return None
        candidates = [
            each for each in self.roster.running if self.roster.policy.may_preempt(sequence.request, each.request)
        ]
        num_seats = sum(map(self.roster.running.num_seats, candidates))
        num_blocks = sum(len(candidate.block_table) for candidate in candidates)
        if not self.roster.running.has_seats_for(sequence, besides=num_seats):
            return None
        if self.roster.tables.num_short(sequence, target) + self._num_spare_blocks() > num_blocks:
            return None
        return max(candidates, key=lambda candidate: candidate.order, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        self._has_preempted = True
        self.roster.preempt(sequence)

    # ---- committing

    def _commit_decodes(self, rows: list[Row], samples: list[Sampled]) -> None:
        """The hot loop, well under a microsecond a row: only what fills its block or may end is looked at closer."""
        to_check: list[Row] = []
        to_fail: list[tuple[Row, Sampled]] = []
        for row, sampled in zip(rows, samples, strict=True):
            token_id = sampled.token_id
            if token_id is None:
                to_fail.append((row, sampled))
                continue
            sequence = row.sequence
            sequence.output_token_ids.append(token_id)
            row.token_ids[0] = token_id
            row.start = num_computed = row.start + 1
            sequence.num_computed_tokens = num_computed
            if num_computed >= sequence.check_at or token_id in sequence.request.stop_token_ids:
                to_check.append(row)
        for row, sampled in to_fail:
            self.roster.drop(row.sequence, "error", error=sampled.error or "no token was drawn")
        for row in to_check:
            self._check(row)

    def _check(self, row: Row) -> None:
        sequence = row.sequence
        self.roster.cache.register(sequence)
        finish = finish_of(sequence)
        if finish is not None:
            self.roster.drop(sequence, *finish)
        elif row.start == len(sequence.block_table) * self.roster.pool.block_size:
            self._needy.append(row)

    def _commit_chunk(self, row: Row, samples: list[Sampled], prompt_logprobs: list[PositionLogprobs]) -> None:
        sequence = row.sequence
        request = sequence.request
        is_done = row.end == sequence.target
        sequence.num_computed_tokens = row.end
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += prompt_logprobs  # the row asked for the next ones and no others
        self.roster.cache.register(sequence)
        if not is_done:
            return
        if sequence is request.trunk:
            self.roster.fork(sequence)
        for drawn, sampled in zip(row.draws, samples, strict=True):
            self._begin_decode(drawn, sampled)
        while self.roster.running.num_seats_taken > self._config.max_num_seqs:
            last = max((each for each in self.roster.running if each.request is request), key=lambda each: each.order)
            self.roster.preempt(last, may_swap=False)

    def _begin_decode(self, sequence: Sequence, sampled: Sampled) -> None:
        """The first draw after a prompt, or after what was computed again."""
        if sampled.token_id is None:
            self.roster.drop(sequence, "error", error=sampled.error or "no token was drawn")
            return
        sequence.output_token_ids.append(sampled.token_id)
        finish = finish_of(sequence)
        if finish is not None:
            self.roster.drop(sequence, *finish)
        else:
            self._needy.append(self.roster.running.begin_decode(sequence))

    def _fail_row(self, row: Row, error: str) -> None:
        """Its forward failed: so did every choice that depends on it."""
        if row.sequence.request.is_forked:
            self.roster.drop(row.sequence, "error", error=error)
        else:
            self.roster.drop_all(row.sequence.request, "error", error=error)

    def _check_idle(self) -> None:
        if self._in_flight is not None:
            raise RuntimeError("a plan is being executed: commit or abandon it first")

    def _take_from_flight(self, plan: Plan) -> None:
        if plan is not self._in_flight:
            raise RuntimeError("this is not the plan being executed")
        self._in_flight = None


def _num_prompt_logits(sequence: Sequence, start: int, end: int) -> int:
    """How many last positions of start..end must give logits so that the prompt logprobs asked for go on."""
    known = sequence.request.prompt_logprobs
    if known is None:
        return 0
    first = max(start, len(known) - 1)
    return end - first if first < min(end, sequence.num_prompt_tokens - 1) else 0


def _running(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.sequence.state is SequenceState.RUNNING]
