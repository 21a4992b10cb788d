"""Every request in the engine and where its sequences are: waiting, or running with a seat and blocks. Pure.

It moves sequences between states and keeps the books true; who moves, and when, the scheduler decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    def start(self, now: float) -> Sequence:
        """The sequence that goes first has its blocks: it gets a seat."""
        sequence = self.waiting.pop()
        if sequence.state is SequenceState.WAITING:
            request = sequence.request
            request.first_scheduled = now
            request.num_cached_tokens = min(sequence.num_computed_tokens, request.num_prompt_tokens)
            self.cache.count(request.num_prompt_tokens, request.num_cached_tokens)
            self.policy.started(request)
        sequence.move_to(SequenceState.RUNNING)
        self.running.start(sequence)
        return sequence

    def fork(self, trunk: Sequence) -> None:
        """The prompt is computed: the other choices share its blocks from here."""
        request = trunk.request
        others = [sequence for sequence in request.sequences if not (sequence is trunk or sequence.is_finished)]
        request.is_forked = True
        for sequence in others:
            self.tables.fork(trunk, sequence)
            sequence.move_to(SequenceState.RUNNING)
            self.running.start(sequence)

    def preempt(self, sequence: Sequence, *, may_swap: bool = True) -> None:
        """Takes a running sequence's seat and blocks; it waits in its old place."""
        self.running.leave(sequence)
        sequence.request.num_preemptions += 1
        if may_swap and self._prefers_swap(sequence) and self.tables.try_swap_out(sequence):
            sequence.request.num_swaps += 1
            self.num_swaps += 1
            sequence.move_to(SequenceState.SWAPPED)
        else:
            self.num_recomputes += 1
            self.tables.release(sequence)
            sequence.move_to(SequenceState.PREEMPTED)
        self.waiting.push(sequence)

    def lose_blocks(self, sequence: Sequence) -> None:
        """The blocks of a running or swapped sequence are gone: it keeps its place and will be computed again."""
        if sequence.state is SequenceState.RUNNING:
            self.running.leave(sequence)
            sequence.move_to(SequenceState.PREEMPTED)
            self.waiting.push(sequence)
        elif sequence.state is SequenceState.SWAPPED:
            self.waiting.lose_blocks(sequence)

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

    def _prefers_swap(self, sequence: Sequence) -> bool:
        mode = self._preemption_mode
        num_tokens = sequence.num_computed_tokens
        if mode == "recompute" or num_tokens == 0 or self.host.num_slots == 0:
            return False
        num_blocks = self.pool.num_blocks_for(num_tokens)
        return mode == "swap" or self._costs.prefers_swap(num_tokens=num_tokens, num_blocks=num_blocks)

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
        if num_blocks > self.pool.num_blocks:
            raise InvalidRequest(
                "max_tokens",
                f"{num_prompt} prompt tokens and up to {request.params.max_tokens} more need {num_blocks} KV blocks of "
                f"{self.pool.block_size}; the pool has {self.pool.num_blocks}; shorten the prompt or lower max_tokens",
            )
