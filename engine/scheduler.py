"""Decides each step: who runs, on which tokens, in which blocks. Pure: no torch, no clock of its own, no I/O.

    add -> waiting --start--> prefilling --prompt done--> decoding --finish--> gone
              ^                    |                          |
              +---- preempted: recompute, or swapped out -----+

One step: `plan(now)`, the forward, `commit(plan, result)`; or `abandon(plan)` where the forward failed. `plan_ahead`
makes the next one meanwhile, where it may: between steps such a plan is under way, and requests come and go as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.ahead_planner import AheadPlan, AheadPlanner
from engine.plan import Plan, StepResult
from engine.roster import Roster
from engine.speculation.speculator import Speculator
from engine.step_committer import StepCommitter
from engine.step_planner import StepPlanner, running_rows

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.costs import StepCosts
    from engine.outputs import FinishReason
    from engine.sequence import Request, Sequence


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        *,
        num_blocks: int,
        num_host_slots: int,
        max_model_len: int,
        costs: StepCosts,
        max_draft_len: int | None = None,
    ) -> None:
        """`max_draft_len`: tokens of context of the model that drafts, where one does."""
        self.roster = Roster(
            config, num_blocks=num_blocks, num_host_slots=num_host_slots, max_model_len=max_model_len, costs=costs
        )
        is_plain = config.speculative in ("auto", "none")
        self.speculator = None if is_plain else Speculator(config, costs, max_draft_len)
        self._planner = StepPlanner(self.roster, config, costs, self.speculator)
        self._committer = StepCommitter(self.roster, config, self.speculator)
        self._ahead_planner = AheadPlanner(self.roster)
        self._step_index = 0
        self._in_flight: Plan | None = None

    # ---- requests come and go

    @property
    def num_requests(self) -> int:
        return len(self.roster.requests)

    @property
    def num_free_tokens(self) -> int:
        """Token slots that are neither held nor promised to what prefills or waits."""
        promised = self._planner.num_promised_blocks() * self.roster.pool.block_size + self.roster.waiting.num_tokens
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
        self._in_flight = self._planner.plan(self._step_index, now)
        return self._in_flight

    def plan_ahead(self) -> AheadPlan | None:
        """The step after the one being executed, to be launched behind it; None where that one must be done first."""
        assert self._in_flight is not None
        if self.speculator is not None:
            return None  # what a sequence verifies next depends on what it accepts now
        return self._ahead_planner.plan(self._in_flight, self._step_index + 1)

    def begin(self, plan: AheadPlan) -> None:
        """The step before it is committed: now this one is being executed."""
        self._check_idle()
        self._step_index = plan.step_index
        self._in_flight = plan

    def landed(self, plan: Plan, result: StepResult) -> tuple[Plan, StepResult]:
        """What to commit of an executed plan: of one that was planned ahead, without the rows that have become void."""
        if not isinstance(plan, AheadPlan):
            return plan, result
        self._take_from_flight(plan)
        live = [index for index, row in enumerate(plan.rows) if not row.sequence.is_finished]
        self._in_flight = Plan(plan.step_index, [plan.bases[index] for index in live], len(live))
        return self._in_flight, StepResult([result.samples[index] for index in live])

    def commit(self, plan: Plan, result: StepResult) -> dict[int, int]:
        """Takes the outcome of a plan: tokens are appended, blocks become findable, sequences fork and finish.

        Returns how many samples of each row with proposals count, by the row's index in the plan.
        """
        self._take_from_flight(plan)
        return self._committer.commit(plan, result)

    def abandon(self, plan: Plan) -> Plan:
        """The plan's execution failed somewhere: nothing of it is committed, and its block moves are undone.

        Sequences whose blocks it moved lose them and are computed again. Returns the rest as a plan without moves, to
        be executed at once, whole or in parts, and committed.
        """
        self._take_from_flight(plan)
        for sequence in self.roster.tables.abandon():
            self.roster.lose_blocks(sequence)
        rows = plan.bases if isinstance(plan, AheadPlan) else plan.rows
        decodes, chunks = running_rows(rows[: plan.num_decodes]), running_rows(rows[plan.num_decodes :])
        self._in_flight = Plan(plan.step_index, decodes + chunks, len(decodes))
        return self._in_flight

    def discard_plan(self) -> None:
        """Nothing came of the plan being executed, if there is one: its sequences are as they were before it."""
        if self._in_flight is not None:
            for row in self.abandon(self._in_flight).rows:
                row.withdraw_proposals()
            self._in_flight = None

    def check_integrity(self) -> None:
        """Conservation of blocks and host slots, and agreement of the books; RuntimeError says what broke."""
        self.roster.check_integrity()

    def _check_idle(self) -> None:
        if self._in_flight is not None:
            raise RuntimeError("a plan is being executed: commit or abandon it first")

    def _take_from_flight(self, plan: Plan) -> None:
        if plan is not self._in_flight:
            raise RuntimeError("this is not the plan being executed")
        self._in_flight = None
