"""Makes the rows of a plan: who gets blocks, chunks and seats in the next step. Pure.

A plan spends one budget of tokens: every decoding sequence first (one token each), then proposals to verify, then
prefill chunks in the policy's order, then sequences that start. Where blocks run out, running work is preempted, the
policy's last first; what a plan preempts does not come back in it. Proposals take what blocks are left, and preempt
nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan import Plan, Row
from engine.sequence import SequenceState

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.costs import StepCosts
    from engine.roster import Roster
    from engine.sequence import Sequence
    from engine.speculation.speculator import Speculator

_WATERMARK = 0.01  # share of the pool that a start leaves to running sequences


class StepPlanner:
    def __init__(self, roster: Roster, config: EngineConfig, costs: StepCosts, speculator: Speculator | None) -> None:
        self._roster = roster
        self._speculator = speculator
        self._config = config
        self._costs = costs
        self._has_preempted = False  # in the plan in the making

    def plan(self, step_index: int, now: float) -> Plan:
        self._has_preempted = False
        self._grow_decodes()
        proposals = self._proposals()
        budget = self._prefill_budget(sum(len(token_ids) for _, token_ids in proposals))
        chunks = self._chunk_prefills(budget)
        chunks += self._start_waiting(budget - sum(len(row.token_ids) for row in chunks), now)
        chunks = running_rows(chunks)  # some may have been preempted again
        decoding = self._roster.running.decoding
        drafted = [row for row, token_ids in proposals if self._try_draft(row, token_ids)]
        if drafted:
            decoding = [row for row in decoding if not row.num_proposals]
        copies, swap_out, swap_in = self._roster.tables.take_moves()
        return Plan(step_index, decoding + drafted + chunks, len(decoding), copies, swap_out, swap_in)

    def num_promised_blocks(self) -> int:
        """Blocks that prefilling sequences will still need for the tokens they have."""
        return sum(
            max(0, self._roster.pool.num_blocks_for(sequence.target) - len(sequence.block_table))
            for sequence in self._roster.running.prefilling
        )

    def _grow_decodes(self) -> None:
        for row in self._roster.running.take_needy():
            sequence = row.sequence
            while sequence.state is SequenceState.RUNNING:
                if self._roster.tables.try_grow(sequence, row.start + 1):
                    self._roster.note_next_check(sequence)
                    break
                self._preempt(self._roster.running.last())

    def _proposals(self) -> list[tuple[Row, list[int]]]:
        """What decoding rows should verify, if blocks can be had for it. While others prefill or wait, they are left
        half of what decodes leave of the budget.
        """
        rows = self._roster.running.decoding
        if self._speculator is None or not rows:
            return []
        room = self._config.max_num_batched_tokens - len(rows)
        if self._roster.running.prefilling or len(self._roster.waiting):
            room //= 2
        proposals = self._speculator.propose(rows, room)
        return [(row, token_ids) for row, token_ids in zip(rows, proposals, strict=True) if token_ids]

    def _try_draft(self, row: Row, token_ids: list[int]) -> bool:
        """Makes the row verify its proposals, as many as there are blocks for; False where it has lost its seat."""
        sequence = row.sequence
        if sequence.state is not SequenceState.RUNNING:
            return False
        if not self._roster.tables.try_grow(sequence, row.start + 1 + len(token_ids)):
            token_ids = token_ids[: len(row.block_table) * self._roster.pool.block_size - row.start - 1]
        row.propose(token_ids)
        row.draft_start = sequence.num_draft_tokens
        return bool(token_ids)

    def _prefill_budget(self, num_proposals: int) -> int:
        budget = self._config.max_num_batched_tokens - len(self._roster.running.decoding) - num_proposals
        if self._roster.running.decoding and self._config.max_step_seconds is not None:
            within = self._costs.num_prefill_tokens_within(self._config.max_step_seconds)
            if within is not None:
                return min(budget, max(within, self._roster.pool.block_size))  # prefill is slowed, never stopped
        return budget

    def _chunk_prefills(self, budget: int) -> list[Row]:
        rows = []
        for sequence in self._roster.running.prefilling.copy():
            if budget > 0 and sequence.state is SequenceState.RUNNING and not _waits_for_beams(sequence):
                row = self._try_chunk(sequence, budget)
                if row is not None:
                    rows.append(row)
                    budget -= len(row.token_ids)
        return rows

    def _start_waiting(self, budget: int, now: float) -> list[Row]:
        rows: list[Row] = []
        while budget > 0:
            started = self._try_start(now)
            if not started:
                break
            for sequence in started:
                if budget > 0 and sequence.state is SequenceState.RUNNING and not _waits_for_beams(sequence):
                    row = self._try_chunk(sequence, budget)
                    if row is None:
                        return rows
                    rows.append(row)
                    budget -= len(row.token_ids)
        return rows

    def _try_chunk(self, sequence: Sequence, budget: int) -> Row | None:
        """The sequence's next chunk of at most `budget` tokens; None where no block can be had for it now."""
        start, target = sequence.num_computed_tokens, sequence.target
        end = min(target, start + budget)
        while not self._roster.tables.try_grow(sequence, end):
            victim = self._roster.running.last()
            if victim in sequence.group:
                return None  # it keeps what it has until those before it are done
            self._preempt(victim)
        draws = sequence.draws if end == target else []
        num_logits = max(1 if draws else 0, _num_prompt_logits(sequence, start, end))
        return Row(sequence, start, sequence.tokens(start, end), sequence.block_table, num_logits, draws)

    def _try_start(self, now: float) -> list[Sequence]:
        """Starts the sequence that goes first, if there is a seat and room; the policy may preempt for it.

        Beams that were swapped start together.
        """
        sequence = self._roster.waiting.peek()
        if sequence is None or (self._has_preempted and sequence.state is not SequenceState.WAITING):
            return []
        target = sequence.target
        while not (
            self._roster.running.has_seats_for(sequence)
            and self._roster.tables.try_start(sequence, target, spare=self._num_spare_blocks())
        ):
            victim = self._yielding_to(sequence, target)
            if victim is None:
                return []
            self._preempt(victim)
        return self._roster.start(now)

    def _num_spare_blocks(self) -> int:
        """Blocks that a start must leave: what prefilling sequences were promised, and a watermark while any runs."""
        watermark = int(_WATERMARK * self._roster.pool.num_blocks) if len(self._roster.running) else 0
        return self.num_promised_blocks() + watermark

    def _yielding_to(self, sequence: Sequence, target: int) -> Sequence | None:
        """The running sequence to preempt for a waiting one; None where the policy has none, or all are not enough."""
        if not self._roster.policy.preempts:
            return None
        candidates = [
            each for each in self._roster.running if self._roster.policy.may_preempt(sequence.request, each.request)
        ]
        num_seats = sum(map(self._roster.running.num_seats, candidates))
        num_blocks = sum(len(candidate.block_table) for candidate in candidates)
        if not self._roster.running.has_seats_for(sequence, besides=num_seats):
            return None
        if self._roster.tables.num_short(sequence, target) + self._num_spare_blocks() > num_blocks:
            return None
        return max(candidates, key=lambda candidate: candidate.order, default=None)

    def _preempt(self, sequence: Sequence) -> None:
        self._has_preempted = True
        self._roster.preempt(sequence)


def running_rows(rows: list[Row]) -> list[Row]:
    """Those whose sequences still have their seats."""
    return [row for row in rows if row.sequence.state is SequenceState.RUNNING]


def _waits_for_beams(sequence: Sequence) -> bool:
    """Whether it has computed all it has: a beam that has proposed, and waits for those beside it to do so."""
    return sequence.num_computed_tokens == sequence.target


def _num_prompt_logits(sequence: Sequence, start: int, end: int) -> int:
    """How many last positions of start..end must give logits so that the prompt logprobs asked for go on."""
    known = sequence.request.prompt_logprobs
    if known is None:
        return 0
    first = max(start, len(known) - 1)
    return end - first if first < min(end, sequence.num_prompt_tokens - 1) else 0
