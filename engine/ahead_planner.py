"""Plans the step after the one that is being executed, before its tokens are known. Pure.

    step n       plan | execute ................... | commit
    step n + 1                plan ahead | execute ................... | commit
                                         ^ the tokens of step n are not known here: a row names the draw it follows

Only a step of plain decodes has such a successor: the same sequences, one token on. A sequence that step n ends by its
length has no row in it; one that ends otherwise (a stop token, a stop string, an abort) leaves a row that is void when
the plan is committed. Everything else needs the tokens first, or changes who runs: then the next step waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.plan import Plan, Row

if TYPE_CHECKING:
    from engine.roster import Roster
    from engine.sequence import Sequence

_UNKNOWN_TOKEN = 0  # in a row that follows a draw: the runner puts the token in its place


@dataclass(slots=True)
class AheadPlan(Plan):
    """`bases[i]` is the row, kept by the roster, that `rows[i]` goes on from."""

    bases: list[Row] = field(default_factory=list)


class AheadPlanner:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def plan(self, flight: Plan, step_index: int) -> AheadPlan | None:
        """The step after `flight`; None where it has to wait for the tokens of that one."""
        if not self._is_steady(flight):
            return None
        plan = AheadPlan(step_index)
        for place, base in enumerate(flight.bases if isinstance(flight, AheadPlan) else flight.rows):
            sequence = base.sequence
            if sequence.is_finished or _ends_by_length(sequence):
                continue
            if not (_can_go_ahead(sequence) and self._try_hold(sequence, base.start + 2)):
                return None
            start = base.start + 1
            row = Row(sequence, start, [_UNKNOWN_TOKEN], sequence.block_table, 1, [sequence], follows=place)
            plan.rows.append(row)
            plan.bases.append(base)
        plan.num_decodes = len(plan.rows)
        return plan if plan.rows else None

    def _is_steady(self, flight: Plan) -> bool:
        """Whether whoever decodes goes on and nobody else could: then the next step needs no decision."""
        roster = self._roster
        if flight.num_decodes < len(flight.rows) or flight.copies or flight.swap_out or flight.swap_in:
            return False
        if roster.running.prefilling:
            return False
        waiting = roster.waiting.peek()
        return waiting is None or not (roster.policy.preempts or roster.running.has_seats_for(waiting))

    def _try_hold(self, sequence: Sequence, end: int) -> bool:
        """Makes positions up to `end` writable, unless that could move blocks: their plan is being executed already."""
        roster = self._roster
        if end <= len(sequence.block_table) * roster.pool.block_size:
            return True
        return not roster.cache.second_tier and roster.tables.try_grow(sequence, end)


def _ends_by_length(sequence: Sequence) -> bool:
    """Whether the draw under way is its last."""
    max_tokens = sequence.params.max_tokens
    return max_tokens is not None and sequence.num_output_tokens + 1 >= max_tokens


def _can_go_ahead(sequence: Sequence) -> bool:
    """Whether its next draw depends on the token under way through the model alone."""
    params = sequence.params
    return not (
        sequence.request.beams is not None
        or sequence.request.bad_word_token_ids
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.guided is not None
        or sequence.num_output_tokens < params.min_tokens
    )
