"""The engine's face: adds requests, steps, and hands back what each step said.

One thread makes all calls: the engine has no locks. `generate` is the whole in one call; `add_request`, `step` and
`abort` are the incremental form.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import replace

import msgspec

from engine.beams import BeamSearch
from engine.collector import Collector
from engine.config import MODEL_PROPOSERS, EngineConfig, LoadedModel
from engine.costs import StepCosts, StepSize
from engine.errors import InvalidConfig, InvalidRequest
from engine.guided.compiler import GrammarCompiler
from engine.held_back import HeldBackStream
from engine.isolation import IsolatingExecutor
from engine.launcher import HostLauncher, Launcher
from engine.outputs import ChoiceDelta, RequestDelta, RequestOutput
from engine.params import SamplingParams
from engine.pipeline import StepPipeline
from engine.plan import BlockMove, Plan, Runner, Sampled, StepResult
from engine.prompts import bad_word_ids, checked_token_ids, prompt_token_ids
from engine.scheduler import Scheduler
from engine.sequence import SEED_MASK, Request, Sequence
from engine.stats import EngineStats, Totals, stats_of
from engine.streams import RequestStream
from engine.text.detokenizer import Detokenizer

__all__ = ["LLM", "EngineStats", "Prompt"]

log = logging.getLogger(__name__)

Prompt = str | Listed[int] | Mapping[str, object]
"""Text; token ids; or {"prompt": text} or {"prompt_token_ids": ids}. Text gets the model's BOS, ids are taken as is."""

_COPIES_TO_MEASURE = 8


class LLM:
    def __init__(
        self,
        model: str | LoadedModel,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Loads a model by alias, folder, hub id or s3:// URL; `fake` is the deterministic stand-in.

        Raises ModelLoadError or InvalidConfig. `clock` gives seconds and never goes back;
        `wall_clock` is the Unix time that deadlines are given in.
        """
        config = config or EngineConfig()
        loaded = model if isinstance(model, LoadedModel) else _load(model, config)
        self.config = config.for_model(loaded.info)
        runner = loaded.runner
        if runner.block_size != self.config.block_size:  # tables and storage would disagree, silently
            raise InvalidConfig(
                "block_size", f"is {self.config.block_size}, and the loaded model keeps blocks of {runner.block_size}"
            )
        num_slots = runner.num_kv_blocks * runner.block_size
        self.tokenizer = loaded.tokenizer
        self.grammars = GrammarCompiler(loaded.tokenizer, loaded.info.vocab_size)
        self.info = replace(loaded.info, max_model_len=min(loaded.info.max_model_len, num_slots))
        if num_slots < loaded.info.max_model_len:
            log.info("the KV pool of %d tokens bounds the context of %d", num_slots, loaded.info.max_model_len)
        self._clock = clock
        self._wall_clock = wall_clock
        self._costs = StepCosts(seconds_per_block_copy=_measured_copy(runner, clock))
        self._scheduler = Scheduler(
            self.config,
            num_blocks=runner.num_kv_blocks,
            num_host_slots=runner.num_host_slots,
            max_model_len=self.info.max_model_len,
            costs=self._costs,
            max_draft_len=loaded.info.max_draft_len,
        )
        self._has_drafter = self.config.speculative in MODEL_PROPOSERS
        self._executor = IsolatingExecutor(runner, self._scheduler)
        self._pipeline = StepPipeline(self._scheduler, self._executor, _launcher(runner, self.config))
        self._streams: dict[str, RequestStream] = {}
        self._early: list[RequestDelta] = []  # told by the next step: ends that needed none
        self._totals = Totals()

    # ---- the incremental form

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        tenant: str = "",
        adapter: str = "",
        emitted: Listed[Listed[int]] | None = None,
    ) -> None:
        """Queues a request. Raises InvalidRequest, nothing queued, where it cannot be served.

        `salt` bounds who shares its cached prefixes, `tenant` whom the policy `fair` charges. `emitted` holds the
        token ids that each choice has emitted in an earlier life: it goes on behind them, tells only what is new, and
        a choice that they end is told as finished.
        """
        if request_id in self._streams or any(delta.request_id == request_id for delta in self._early):
            raise InvalidRequest("request_id", f"{request_id!r} is in use; choose another")
        request = self._request(request_id, prompt, params or SamplingParams(), emitted)
        request.salt, request.tenant, request.adapter = salt, tenant, adapter
        stream = (HeldBackStream if request.params.is_held_back else RequestStream)(request, self.tokenizer)
        self._scheduler.add(request)
        self._totals.num_prompt_tokens += request.num_prompt_tokens
        ends = stream.ends_emitted()
        if ends:
            self._early.append(stream.delta(ends, request.arrival))
        if not stream.is_told:
            self._streams[request_id] = stream

    def step(self) -> list[RequestDelta]:
        """Makes one step; returns what it said, one delta for each request that has something new, or nothing.

        Raises DeviceFailed where no request can be computed any more: hand them over and start anew.
        """
        deltas, self._early = self._early, []
        if not self._scheduler.num_requests:
            return deltas
        began = self._clock()
        try:
            plan, result = self._pipeline.next(began)
        except BaseException:
            self._scheduler.discard_plan()
            raise
        samples, done = result.by_row(plan), self._size(plan)
        num_taken = self._scheduler.commit(plan, result)
        for index, count in num_taken.items():
            samples[index] = samples[index][:count]
        now = self._clock()
        done = done._replace(num_drawn=plan.num_decodes + sum(num_taken.values()))
        self._totals.num_steps += 1
        self._totals.num_computed_tokens += done.num_tokens
        self._costs.observe(done, now - began, result.draft_seconds)
        return deltas + self._told(plan, result, samples, now)

    def abort(self, request_id: str) -> RequestDelta | None:
        """Ends a request at once and frees its blocks; returns its last delta, None where there is no such request.

        Steps say nothing of it any more. Where steps overlap, the one under way still computes its row, for nobody.
        """
        early = [delta for delta in self._early if delta.request_id == request_id]
        self._early = [delta for delta in self._early if delta.request_id != request_id]
        self._scheduler.abort(request_id)
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return early[0] if early else None
        ends = [end for delta in early for end in delta.deltas] + stream.ends()
        return stream.delta(ends, self._clock())

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._early) or self._scheduler.num_requests > 0

    # ---- the whole in one call

    def generate(
        self, prompts: Prompt | Listed[Prompt], params: SamplingParams | Listed[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completes the prompts together; outputs are in their order. `params` holds for all, or is one for each.

        Raises InvalidRequest, nothing generated, where one of them cannot be served. The engine must be idle.
        """
        if self.has_unfinished():
            raise RuntimeError("generate needs an engine without other requests; step until they are done")
        listed = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        if listed and all(isinstance(token_id, int) for token_id in listed):
            raise InvalidRequest("prompt", 'token ids are written [[1, 2, 3]] or {"prompt_token_ids": [1, 2, 3]}')
        each = [params or SamplingParams()] * len(listed) if isinstance(params, SamplingParams | None) else list(params)
        if len(each) != len(listed):
            raise InvalidRequest(
                "params", f"{len(each)} are given for {len(listed)} prompts; give one, or one for each"
            )
        collectors: dict[str, Collector] = {}
        try:
            for index, (prompt, its_params) in enumerate(zip(listed, each, strict=True)):
                request_id = f"generate-{index}"
                self.add_request(request_id, prompt, its_params)  # type: ignore[arg-type]
                request = self._streams[request_id].request
                collectors[request_id] = Collector(request_id, request.prompt_token_ids, request.params.n)
            while self.has_unfinished():
                for delta in self.step():
                    collectors[delta.request_id].add(delta)
        except BaseException:
            for request_id in collectors:
                self.abort(request_id)
            raise
        return [collector.output() for collector in collectors.values()]

    # ---- what it says about itself

    def stats(self) -> EngineStats:
        """Gauges and counters; cheap enough for every step."""
        return stats_of(self._scheduler, self._costs, self._totals, num_failed_rows=self._executor.num_failed_rows)

    def check_integrity(self) -> None:
        """Raises RuntimeError where blocks, host slots or books do not add up."""
        self._scheduler.check_integrity()

    def drop_prefix_cache(self) -> int:
        """Forgets every cached prefix, such as before a measurement; returns how many blocks became free."""
        return self._scheduler.roster.pool.drop_cached()

    # ---- inside

    def _request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, emitted: Listed[Listed[int]] | None
    ) -> Request:
        vocab_size = self.info.vocab_size
        token_ids = prompt_token_ids(prompt, self.tokenizer, vocab_size)
        params = params.validated(
            vocab_size=vocab_size, max_model_len=self.info.max_model_len, num_prompt_tokens=len(token_ids)
        )
        seed = (secrets.randbits(63) if params.seed is None else params.seed) & SEED_MASK
        eos = frozenset() if params.ignore_eos else frozenset(self.info.eos_token_ids)
        now = self._clock()
        request = Request(
            request_id,
            token_ids,
            msgspec.structs.replace(params, seed=seed),
            seed,
            arrival=now,
            deadline=None if params.deadline is None else now + (params.deadline - self._wall_clock()),
            bad_word_token_ids=bad_word_ids(params.bad_words or [], self.tokenizer, vocab_size),
            eos_token_ids=eos,
            stop_token_ids=eos | frozenset(params.stop_token_ids),
        )
        if emitted is not None and len(emitted) > params.n:
            raise InvalidRequest("emitted", f"holds {len(emitted)} choices and n is {params.n}; leave out the rest")
        if params.is_held_back and any(emitted or []):
            raise InvalidRequest("emitted", "holds tokens, and such a request emits none before its end; leave it out")
        for choice in range(params.num_sequences):
            before = emitted[choice] if emitted is not None and choice < len(emitted) else []
            outputs = checked_token_ids("emitted", before, vocab_size)
            matcher = None if params.guided is None else self.grammars.compile(params.guided)
            request.sequences.append(Sequence(request, choice, seed, outputs, matcher=matcher))
        if params.use_beam_search:
            text = Detokenizer(self.tokenizer, token_ids, params.stop, min_tokens=params.min_tokens)
            request.beams = BeamSearch(request, text if params.stop else None)
        return request

    def _size(self, plan: Plan) -> StepSize:
        """Of a plan that is not committed yet, which moves its rows on."""
        depths = [row.num_proposals for row in plan.rows]
        num_decoding = plan.num_decodes + sum(depth > 0 for depth in depths)
        num_proposals = sum(depths)
        return StepSize(
            num_prefill_tokens=plan.num_tokens - num_decoding - num_proposals,
            num_decoding=num_decoding,
            num_proposals=num_proposals,
            draft_depth=max(depths, default=0) if self._has_drafter else 0,
        )

    def _told(self, plan: Plan, result: StepResult, samples: list[list[Sampled]], now: float) -> list[RequestDelta]:
        """Turns each row's draws into deltas; stop strings found on the way end their choices."""
        found: dict[str, list[ChoiceDelta]] = {}
        for index, row in enumerate(plan.rows):
            request_id = row.sequence.request.request_id
            stream = self._streams[request_id]
            deltas = found.setdefault(request_id, [])
            drawn = samples[index]
            each_drawn = [drawn] if len(row.draws) == 1 else [[sampled] for sampled in drawn]
            for sequence, its_samples in zip(row.draws, each_drawn, strict=True):
                choice = stream.choices[sequence.choice]
                num_before = choice.num_tokens
                deltas += stream.advance(sequence, its_samples, now)
                self._totals.num_generated_tokens += choice.num_tokens - num_before
                stop_string = stream.stop_string(sequence)
                if stop_string is not None:
                    self._scheduler.finish(sequence, "stop", stop_string)
            if index in result.row_errors:
                deltas += stream.ends()
        told = []
        for request_id, deltas in found.items():
            stream = self._streams[request_id]
            deltas += stream.outcome()
            if not deltas:
                continue
            if stream.request.beams is not None:
                self._totals.num_generated_tokens += sum(len(delta.token_ids) for delta in deltas)
            told.append(stream.delta(deltas, now))
            if told[-1].finished:
                del self._streams[request_id]
        return told


def _load(model: str, config: EngineConfig) -> LoadedModel:
    if model == "fake":
        from engine.fake_runner import load_fake

        return load_fake(config)
    from engine.runner import load_runner

    return load_runner(model, config)


def _launcher(runner: Runner, config: EngineConfig) -> Launcher | None:
    """What starts steps without waiting for them; None where steps are not to overlap."""
    if config.overlap_scheduling == "off":
        return None
    if isinstance(runner, Launcher):
        return runner
    return HostLauncher(runner) if config.overlap_scheduling == "on" else None


def _measured_copy(runner: Runner, clock: Callable[[], float]) -> float | None:
    """Seconds to move one block one way between device and host; None without host slots. Blocks are empty yet."""
    count = min(_COPIES_TO_MEASURE, runner.num_kv_blocks, runner.num_host_slots)
    if count == 0:
        return None
    moves = [BlockMove(index, index) for index in range(count)]
    runner.execute(Plan(0, swap_out=moves, swap_in=moves))  # the first touch of memory is not what is measured
    began = clock()
    runner.execute(Plan(0, swap_out=moves, swap_in=moves))
    return (clock() - began) / (2 * count)
