"""What an engine says about itself between steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.speculation.counts import SpeculationCounts

if TYPE_CHECKING:
    from engine.costs import StepCosts
    from engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of now, and counters since the start."""

    num_requests: int
    num_running: int  # sequences with a seat
    num_waiting: int  # sequences without one; of them swapped:
    num_swapped: int
    max_num_seqs: int

    block_size: int
    num_kv_blocks: int
    num_held_blocks: int
    num_cached_blocks: int  # held by nobody, content known
    num_free_blocks: int
    kv_usage: float  # share of the pool that is held, 0..1
    kv_waste: float  # share of the allocated token slots that hold nothing, 0..1
    free_tokens: int  # token slots that are neither held nor promised to what prefills or waits

    num_host_slots: int
    num_pinned_host_slots: int

    num_steps: int
    num_prompt_tokens: int  # of prompts added
    num_generated_tokens: int
    num_computed_tokens: int  # by forwards, what was computed again included
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preempted_recompute: int
    num_preempted_swap: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_drafted_tokens: int  # proposals that were verified
    num_accepted_tokens: int  # of them accepted
    acceptance_by_position: tuple[float | None, ...]  # share accepted of the proposals at each place; None: none yet
    tokens_per_verification: float | None  # that came of a row with proposals, its own token included; None: none yet
    num_failed_rows: int  # rows of a plan whose forward raised

    prefill_tokens_per_s: float | None  # measured; None until then
    decode_tokens_per_s: float | None


@dataclass(slots=True)
class Totals:
    """Counters since the engine's start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0


def stats_of(scheduler: Scheduler, costs: StepCosts, totals: Totals, *, num_failed_rows: int) -> EngineStats:
    roster = scheduler.roster
    pool, tables, waiting = roster.pool, roster.tables, roster.waiting
    counts = SpeculationCounts(0) if scheduler.speculator is None else scheduler.speculator.counts
    num_allocated = pool.num_held * pool.block_size
    return EngineStats(
        num_requests=scheduler.num_requests,
        num_running=len(roster.running),
        num_waiting=len(waiting),
        num_swapped=waiting.num_swapped,
        max_num_seqs=roster.running.max_num_seqs,
        block_size=pool.block_size,
        num_kv_blocks=pool.num_blocks,
        num_held_blocks=pool.num_held,
        num_cached_blocks=pool.num_cached,
        num_free_blocks=pool.num_free,
        kv_usage=pool.utilization,
        kv_waste=tables.num_unused_slots(roster.running) / num_allocated if num_allocated else 0.0,
        free_tokens=scheduler.num_free_tokens,
        num_host_slots=roster.host.num_slots,
        num_pinned_host_slots=roster.host.num_pinned,
        num_steps=totals.num_steps,
        num_prompt_tokens=totals.num_prompt_tokens,
        num_generated_tokens=totals.num_generated_tokens,
        num_computed_tokens=totals.num_computed_tokens,
        num_prefix_queried_tokens=roster.cache.num_queried_tokens,
        num_prefix_hit_tokens=roster.cache.num_hit_tokens,
        num_preempted_recompute=roster.num_recomputes,
        num_preempted_swap=roster.num_swaps,
        num_swapped_out_blocks=tables.num_swapped_out,
        num_swapped_in_blocks=tables.num_swapped_in,
        num_drafted_tokens=counts.num_drafted,
        num_accepted_tokens=counts.num_accepted,
        acceptance_by_position=counts.acceptance_by_position,
        tokens_per_verification=counts.num_drawn / counts.num_rows if counts.num_rows else None,
        num_failed_rows=num_failed_rows,
        prefill_tokens_per_s=_per_second(costs.seconds_per_prefill_token),
        decode_tokens_per_s=_per_second(costs.seconds_per_decode_token),
    )


def _per_second(seconds: float | None) -> float | None:
    return 1 / seconds if seconds else None
