"""The real engine over the fake runner, with every plan checked before it is executed; a clock that only steps move."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from engine import LLM, EngineConfig, SamplingParams
from engine.ahead_planner import AheadPlan
from engine.collector import Collector
from engine.config import LoadedModel
from engine.fake_runner import FakeRunner, load_fake
from engine.outputs import RequestDelta, RequestOutput
from engine.plan import Plan, Row, StepResult
from tests.engine import invariants

WALL_TIME = 1_000_000.0  # Unix time at which a harness starts


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return WALL_TIME + self.now


class Violation(BaseException):
    """An invariant does not hold. No Exception, so that the engine's isolation of failures lets it through."""


class CheckedRunner(FakeRunner):
    """Asserts every invariant of a plan, then executes it. `fail_next`: where the next execution raises."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, verify_kv=True)
        self.config = config
        self.llm: LLM
        self.plans: list[Plan] = []
        self.checks = True
        self.num_failures = 0
        self.failed_steps: set[int] = set()
        self.fail_next: str | None = None  # "before" anything is done, or "after" all of it

    def execute(self, plan: Plan) -> StepResult:
        if self.checks and plan.step_index:  # 0: a measurement or a probe, no step's plan
            try:
                self.check(plan)
            except (AssertionError, RuntimeError) as error:
                raise Violation(str(error)) from error
        where = None
        if plan.step_index and plan.step_index not in self.failed_steps:  # probes, and parts tried again, are spared
            where, self.fail_next = self.fail_next, None
        if where is not None:
            self.failed_steps.add(plan.step_index)
        if where == "before":
            self._fail()
        result = super().execute(plan)
        if where == "after":
            self._fail()
        return result

    def _check_context(self, row: Row) -> None:
        try:
            super()._check_context(row)
        except RuntimeError as error:
            raise Violation(str(error)) from error  # else the engine would isolate the row and compute it again

    def check(self, plan: Plan) -> None:
        scheduler = self.llm._scheduler
        invariants.conservation(scheduler)
        invariants.budget_kept(plan, self.config)
        invariants.seats_kept(scheduler, self.config)
        invariants.plan_is_well_formed(plan)
        invariants.plan_within_pool(plan, scheduler)
        invariants.writes_are_exclusive(plan, scheduler)
        invariants.beams_stay_together(scheduler)
        if not self.num_failures:  # a plan that is executed in parts does not hold everyone
            invariants.copies_serve_rows(plan, scheduler)
            if not isinstance(plan, AheadPlan):  # there it may have its last token under way
                invariants.the_first_goes_on(plan, scheduler)

    def _fail(self) -> None:
        self.num_failures += 1
        raise RuntimeError("injected failure")


class Harness:
    """An engine under test: adds requests, steps, and gathers what each request was told."""

    def __init__(self, **config: Any) -> None:
        num_host_slots = config.pop("num_host_slots", 0)
        self.config = EngineConfig(swap_space=num_host_slots / 4096, **config)
        self.clock = Clock()
        self.runner = CheckedRunner(self.config)
        loaded = load_fake(self.config)
        model = LoadedModel(runner=self.runner, tokenizer=loaded.tokenizer, info=loaded.info)
        self.llm = LLM(model, self.config, clock=self.clock, wall_clock=self.clock.wall)
        self.runner.llm = self.llm
        self.collectors: dict[str, Collector] = {}
        self.deltas: dict[str, list[RequestDelta]] = {}
        self.finished: list[str] = []

    @property
    def scheduler(self) -> Any:
        return self.llm._scheduler

    def add(self, request_id: str, prompt: list[int] | str, **params: Any) -> None:
        own = {name: params.pop(name) for name in ("salt", "tenant", "adapter", "emitted") if name in params}
        self.llm.add_request(request_id, prompt, SamplingParams(**params), **own)
        self.deltas[request_id] = []
        stream = self.llm._streams.get(request_id)
        if stream is not None:
            request = stream.request
            self.collectors[request_id] = Collector(request_id, request.prompt_token_ids, request.params.n)

    def step(self, *, check: bool = True) -> list[RequestDelta]:
        self.clock.now += 0.01
        told = self.llm.step()
        self.take(told)
        if check:
            invariants.conservation(self.scheduler)
        return told

    def forget(self, request_id: str) -> None:
        """Drops what was gathered of a request."""
        self.collectors.pop(request_id, None)
        self.deltas.pop(request_id, None)

    def take(self, told: list[RequestDelta]) -> None:
        for delta in told:
            self.deltas[delta.request_id].append(delta)
            if delta.request_id in self.collectors:
                self.collectors[delta.request_id].add(delta)
            if delta.finished:
                self.finished.append(delta.request_id)

    def run(self, *, max_steps: int = 10_000) -> None:
        """Steps until nothing is left."""
        for _ in range(max_steps):
            if not self.llm.has_unfinished():
                return
            self.step()
        raise AssertionError(f"{self.scheduler.num_requests} requests are unfinished after {max_steps} steps")

    def output(self, request_id: str) -> RequestOutput:
        return self.collectors[request_id].output()


@lru_cache(maxsize=4096)
def alone(prompt: tuple[int, ...] | str, max_model_len: int | None = None, **params: Any) -> RequestOutput:
    """The request run by itself in an engine with room for everything, without any cache."""
    config = EngineConfig(
        num_kv_blocks=256, max_num_batched_tokens=8192, enable_prefix_caching=False, max_model_len=max_model_len
    )
    llm = LLM(load_fake(config, verify_kv=True), config)
    given = msgspec.convert({k: list(v) if isinstance(v, tuple) else v for k, v in params.items()}, SamplingParams)
    return llm.generate([list(prompt) if isinstance(prompt, tuple) else prompt], given)[0]
