"""What must hold in every state of the engine and of every plan, whatever the schedule. Each is a named function."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.outputs import RequestDelta, RequestOutput
    from engine.plan import Plan
    from engine.scheduler import Scheduler


def conservation(scheduler: Scheduler) -> None:
    """free + held + cached = total, on the device and on the host; every table entry is counted."""
    scheduler.check_integrity()


def budget_kept(plan: Plan, config: EngineConfig) -> None:
    """One step computes no more tokens than it may, for no more sequences than there are seats."""
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert len(plan.rows) <= config.max_num_seqs
    assert len({id(row.sequence) for row in plan.rows}) == len(plan.rows), "a sequence has two rows"


def seats_kept(scheduler: Scheduler, config: EngineConfig) -> None:
    assert scheduler.roster.running.num_seats_taken <= config.max_num_seqs


def plan_is_well_formed(plan: Plan) -> None:
    """Rows hold the next tokens of their sequences, and draw where those are all."""
    for index, row in enumerate(plan.rows):
        sequence = row.sequence
        assert row.token_ids, "a row computes nothing"
        assert row.start == sequence.num_computed_tokens + row.num_pending
        if row.follows is None:
            assert row.token_ids[: len(row.token_ids) - row.num_proposals] == sequence.tokens(row.start, row.end)
        assert row.num_logits <= len(row.token_ids)
        assert row.num_logits or not row.draws
        if index < plan.num_decodes:
            assert len(row.token_ids) == 1 and row.draws == [sequence]
            assert row.end == sequence.num_tokens + row.num_pending
        if row.num_proposals:
            assert index >= plan.num_decodes and row.draws == [sequence] and row.num_logits == len(row.token_ids)
            assert row.num_samples == row.num_logits == row.num_proposals + 1
            assert row.end <= sequence.num_prompt_tokens + sequence.params.max_tokens - 1, "verified beyond the end"
        if row.draws == [sequence] and sequence.num_forks == 1:
            assert row.end - row.num_proposals == sequence.num_tokens + row.num_pending


def plan_within_pool(plan: Plan, scheduler: Scheduler) -> None:
    """Tables cover what rows touch, and every id exists; a block or slot is the target of one move at most."""
    pool, host = scheduler.roster.pool, scheduler.roster.host
    for row in plan.rows:
        assert len(row.block_table) * pool.block_size >= row.end
        assert all(0 <= block < pool.num_blocks for block in row.block_table)
        assert len(set(row.block_table)) == len(row.block_table), "a table holds a block twice"
    for blocks, slots in (
        ([move.source for move in plan.swap_out], [move.target for move in plan.swap_out]),
        ([move.target for move in plan.swap_in], [move.source for move in plan.swap_in]),
    ):
        assert all(0 <= block < pool.num_blocks for block in blocks)
        assert all(0 <= slot < host.num_slots for slot in slots)
    targets = Counter([move.target for move in plan.swap_in] + [move.target for move in plan.copies])
    assert not targets or max(targets.values()) == 1, "a block is filled by two moves"
    slots = Counter(move.target for move in plan.swap_out)
    assert not slots or max(slots.values()) == 1, "a host slot is filled by two moves"
    assert not {move.source for move in plan.copies} & targets.keys(), "the source of a copy is overwritten before it"


def copies_serve_rows(plan: Plan, scheduler: Scheduler) -> None:
    """A block is copied only for a row that writes it in this very plan."""
    size = scheduler.roster.pool.block_size
    written = {row.block_table[row.start // size] for row in plan.rows}
    assert {move.target for move in plan.copies} <= written, "a block is copied for nobody"


def writes_are_exclusive(plan: Plan, scheduler: Scheduler) -> None:
    """A row writes only blocks that no other sequence holds and that no prefix is known by."""
    pool = scheduler.roster.pool
    holders = Counter(
        block
        for request in scheduler.roster.requests.values()
        for sequence in request.sequences
        for block in sequence.block_table
    )
    for row in plan.rows:
        for block in row.block_table[row.start // pool.block_size : -(-row.end // pool.block_size)]:
            assert holders[block] == 1, f"block {block} is written and held {holders[block]} times"
            assert pool.hash_of(block) is None, f"block {block} is written and known to the prefix cache"


def the_first_goes_on(plan: Plan, scheduler: Scheduler) -> None:
    """No starvation: the running sequence that goes first has a row, so it ends; then another is first.

    Where it is a beam that waits for those beside it, one of them has.
    """
    first = min(scheduler.roster.running, key=lambda sequence: sequence.order, default=None)
    if first is not None:
        assert any(row.sequence in first.group for row in plan.rows), "the first sequence was passed over"


def beams_stay_together(scheduler: Scheduler) -> None:
    """Beams that have forked are all running, and hold blocks for as many tokens; else one of them waits for all."""
    for request in scheduler.roster.requests.values():
        if request.beams is None:
            continue
        states = [sequence.state.value for sequence in request.sequences]
        if request.is_forked:
            assert set(states) == {"running"}, f"forked beams are {states}"
            assert len({sequence.num_tokens for sequence in request.sequences}) == 1
        else:
            assert "running" not in states[1:], f"beams that wait as one are {states}"


def nothing_waits_idly(plan: Plan, scheduler: Scheduler) -> None:
    """Whatever is unfinished, a step does something for it."""
    assert plan.rows or not scheduler.num_requests


def nothing_is_held(scheduler: Scheduler) -> None:
    """Idle: every block is free or cached, no host slot pinned, nobody waits."""
    conservation(scheduler)
    roster = scheduler.roster
    assert roster.pool.num_held == 0
    assert roster.pool.num_free + roster.pool.num_cached == roster.pool.num_blocks
    assert roster.host.num_pinned == 0
    assert not len(roster.waiting) and not len(roster.running) and roster.waiting.num_tokens == 0


def each_thing_told_once(deltas: list[RequestDelta]) -> None:
    """The deltas of one request: nothing after its end, one end per choice, prompt logprobs once at most."""
    assert [delta.finished for delta in deltas[:-1]] == [False] * (len(deltas) - 1)
    ended: set[int] = set()
    for delta in deltas:
        for choice in delta.deltas:
            assert choice.index not in ended, "a choice goes on after its end"
            if choice.finish_reason is not None:
                ended.add(choice.index)
    assert sum(delta.prompt_logprobs is not None for delta in deltas) <= 1


def outputs_equal_alone(output: RequestOutput, alone: RequestOutput, *, emitted: list[list[int]] | None = None) -> None:
    """Tokens, text, ends and logprobs are those of the request run alone, as far as they were not emitted before."""
    assert len(output.choices) == len(alone.choices)
    for ours, theirs in zip(output.choices, alone.choices, strict=True):
        before = emitted[ours.index] if emitted is not None else []
        assert before + ours.token_ids == theirs.token_ids
        assert theirs.text.endswith(ours.text) and (before or ours.text == theirs.text)
        assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        assert (ours.logprobs or []) == (theirs.logprobs or [])[len(before) :]
        assert ours.score == theirs.score and (before or ours.cumulative_logprob == theirs.cumulative_logprob)
    if any(len(before) < len(choice.token_ids) for before, choice in zip(emitted or [[]], alone.choices, strict=False)):
        assert output.prompt_logprobs == alone.prompt_logprobs
