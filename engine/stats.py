"""What an engine says about itself between steps."""

from __future__ import annotations

from dataclasses import dataclass


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
    num_failed_rows: int  # rows of a plan whose forward raised

    prefill_tokens_per_s: float | None  # measured; None until then
    decode_tokens_per_s: float | None
