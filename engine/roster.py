"""Every request in the engine and where its sequences are: waiting, or running with a seat and blocks. Pure.

It moves sequences between states and keeps the books true; who moves, and when, the scheduler decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.beams import common_len
from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.errors import InvalidRequest
from engine.finish import finish_of
from engine.host_store import HostStore
from engine.policy import make_policy
from engine.prefix_cache import PrefixCache
from engine.running import RunningSet
from engine.sequence import Sequence, SequenceState
from engine.waiting import WaitingQueue

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.costs import StepCosts
    from engine.outputs import FinishReason
    from engine.sequence import Request


class Roster:
    def __init__(
        self, config: EngineConfig, *, num_blocks: int, num_host_slots: int, max_model_len: int, costs: StepCosts
    ) -> None:
        self.num_recomputes = 0  # preemptions so far
        self.num_swaps = 0
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running = RunningSet(config.max_num_seqs)
        self.policy = make_policy(config)
        self.pool = BlockPool(num_blocks, config.block_size, self._evicted)
        self.host = HostStore(num_host_slots)
        self.cache = PrefixCache(
            self.pool, self.host, enabled=config.enable_prefix_caching, second_tier=config.enable_host_prefix_cache
        )
        self.tables = BlockTables(self.pool, self.cache, self.host)
        self._preemption_mode = config.preemption_mode
        self._max_model_len = max_model_len
        self._costs = costs
        self._num_arrivals = 0

    def add(self, request: Request) -> None:
        """Queues a request; what it has emitted already may have ended some of its sequences, or all."""
        if request.request_id in self.requests:
            raise InvalidRequest("request_id", f"{request.request_id!r} is in use; choose another")
        self._check_fits(request)
        for sequence in request.sequences:
            finish = finish_of(sequence)
            if finish is not None and not sequence.is_finished:
                sequence.move_to(SequenceState.FINISHED)
                sequence.finish_reason, sequence.stop_reason = finish
        if request.trunk is None:
            return  # finished before it began
        self._num_arrivals += 1
        request.arrival_index = self._num_arrivals
        request.key = self.policy.key(request)
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self.requests[request.request_id] = request
        self.waiting.push(request.trunk)

    def start(self, now: float) -> list[Sequence]:
        """The sequence that goes first has its blocks: it gets a seat, and so do beams that come back with it."""
        sequence = self.waiting.pop()
        group = sequence.group
        if sequence.state is SequenceState.WAITING:
            request = sequence.request
            request.first_scheduled = now
            request.num_cached_tokens = min(sequence.num_computed_tokens, request.num_prompt_tokens)
            self.cache.count(request.num_prompt_tokens, request.num_cached_tokens)
            self.policy.started(request)
        for each in group:
            each.move_to(SequenceState.RUNNING)
            self.running.start(each)
        if len(group) > 1:
            sequence.request.is_forked = True
        return group

    def fork(self, trunk: Sequence) -> None:
        """What all share is computed: the other sequences share its blocks from here."""
        request = trunk.request
        others = [sequence for sequence in request.sequences if not (sequence is trunk or sequence.is_finished)]
        request.is_forked = True
        for sequence in others:
            self.tables.fork(trunk, sequence)
            sequence.move_to(SequenceState.RUNNING)
            self.running.start(sequence)

    def preempt(self, sequence: Sequence, *, may_swap: bool = True) -> None:
        """Takes a running sequence's seat and blocks; it waits in its old place, and beams of one request as one."""
        group = sequence.group
        self._leave(group)
        request = sequence.request
        request.num_preemptions += 1
        if may_swap and self._prefers_swap(group) and self.tables.try_swap_out(group):
            request.num_swaps += 1
            self.num_swaps += 1
            for each in group:
                each.move_to(SequenceState.SWAPPED)
        else:
            self.num_recomputes += 1
            self._forget_computed(group)
        self.waiting.push(group[0])

    def lose_blocks(self, sequence: Sequence) -> None:
        """The blocks of a running or swapped sequence are gone: it keeps its place and will be computed again.

        So will the beams beside it.
        """
        group = sequence.group
        if sequence.state is SequenceState.RUNNING:
            self._leave(group)
            self._forget_computed(group)
            self.waiting.push(group[0])
        elif sequence.state is SequenceState.SWAPPED:
            self.waiting.discount(group[0])
            self._forget_computed(group)
            self.waiting.count(group[0])

    def drop_all(self, request: Request, reason: FinishReason, *, error: str | None = None) -> None:
        """Ends all choices of a request that have not ended."""
        trunk = request.trunk
        for sequence in request.sequences:
            if request.is_forked or sequence is trunk:
                self.drop(sequence, reason, error=error)
            elif not sequence.is_finished:
                self._end(sequence, reason, error=error)

    def drop(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        """Takes a sequence from its seat or from the queue, and ends it, if it has not ended."""
        if sequence.is_finished:
            return
        if sequence.state is SequenceState.RUNNING:
            self.running.leave(sequence)
        else:
            self.waiting.discard(sequence)
        self._end(sequence, reason, stop_reason, error)

    def note_next_check(self, sequence: Sequence) -> None:
        """Until so many tokens are computed, a decoding sequence neither fills its block nor ends by length."""
        sequence.check_at = len(sequence.block_table) * self.pool.block_size
        max_tokens = sequence.params.max_tokens
        if max_tokens is not None:
            sequence.check_at = min(sequence.check_at, sequence.num_prompt_tokens + max_tokens - 1)

    def check_integrity(self) -> None:
        """Conservation of blocks and host slots, and agreement of the books; RuntimeError says what broke."""
        running, waiting = list(self.running), self.waiting.sequences()
        sequences = [sequence for request in self.requests.values() for sequence in request.sequences]
        self.tables.check_integrity(sequences)
        for sequence in running:
            if sequence.state is not SequenceState.RUNNING:
                raise RuntimeError(f"{sequence.request.request_id} has a seat and is {sequence.state}")
        placed = {id(sequence) for sequence in running + waiting}
        expected = {id(s) for s in sequences if not s.is_finished and (s.request.is_forked or s is s.request.trunk)}
        if placed != expected or len(placed) != len(running) + len(waiting) or len(waiting) != len(self.waiting):
            raise RuntimeError(
                f"{len(running)} running and {len(waiting)} waiting are not the {len(expected)} there are"
            )
        if self.waiting.num_tokens != sum(sequence.num_tokens for sequence in waiting):
            raise RuntimeError(f"waiting tokens are miscounted: {self.waiting.num_tokens}")

    def _end(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        self.tables.release(sequence)
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish_reason, sequence.stop_reason, sequence.error = reason, stop_reason, error
        request = sequence.request
        if request.is_finished:
            del self.requests[request.request_id]
            self.policy.finished(request)

    def _leave(self, group: list[Sequence]) -> None:
        for sequence in group:
            self.running.leave(sequence)
        if sequence.request.beams is not None:
            sequence.request.is_forked = False

    def _forget_computed(self, group: list[Sequence]) -> None:
        """Takes their blocks. Beams begin anew from what they share."""
        for sequence in group:
            self.tables.release(sequence)
            sequence.move_to(SequenceState.PREEMPTED)
        beams = group[0].request.beams
        if beams is not None and len(group) > 1:
            beams.gather([sequence.output_token_ids for sequence in group])

    def _prefers_swap(self, group: list[Sequence]) -> bool:
        mode = self._preemption_mode
        num_tokens = sum(sequence.num_computed_tokens for sequence in group)
        if mode == "recompute" or num_tokens == 0 or self.host.num_slots == 0:
            return False
        if mode == "swap":
            return True
        if len(group) > 1:
            num_common = common_len([sequence.output_token_ids for sequence in group])
            num_tokens -= (len(group) - 1) * (group[0].num_prompt_tokens + num_common)  # computed once for all
        num_blocks = len({block for sequence in group for block in sequence.block_table})
        return self._costs.prefers_swap(num_tokens=num_tokens, num_blocks=num_blocks)

    def _evicted(self, block: int, content_hash: bytes) -> None:
        self.tables.evicted(block, content_hash)

    def _check_fits(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        if num_prompt >= self._max_model_len:
            raise InvalidRequest(
                "prompt", f"has {num_prompt} tokens, the context holds {self._max_model_len}; shorten it"
            )
        most = num_prompt + max(1, request.params.max_tokens or 1) - 1  # the last token drawn is never computed
        num_blocks = self.pool.num_blocks_for(most)
        if request.beams is not None:
            self._check_beams_fit(request, num_blocks)
        if num_blocks > self.pool.num_blocks:
            raise InvalidRequest(
                "max_tokens",
                f"{num_prompt} prompt tokens and up to {request.params.max_tokens} more need {num_blocks} KV blocks of "
                f"{self.pool.block_size}; the pool has {self.pool.num_blocks}; shorten the prompt or lower max_tokens",
            )

    def _check_beams_fit(self, request: Request, num_blocks_each: int) -> None:
        """Beams run together: seats for all, and in the worst case blocks that share nothing but the prompt."""
        width = len(request.sequences)
        name = "n" if request.params.best_of is None else "best_of"
        if width > self.running.max_num_seqs:
            raise InvalidRequest(
                name, f"is {width} beams, and max_num_seqs lets {self.running.max_num_seqs} run together; lower it"
            )
        num_shared = request.num_prompt_tokens // self.pool.block_size
        num_blocks = num_shared + width * (num_blocks_each - num_shared)
        if num_blocks > self.pool.num_blocks:
            raise InvalidRequest(
                name,
                f"is {width} beams, which after {request.num_prompt_tokens} prompt tokens may need {num_blocks} KV "
                f"blocks of {self.pool.block_size}; the pool has {self.pool.num_blocks}; lower it or max_tokens",
            )
