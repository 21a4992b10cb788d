"""The real engine on a simulated GPU: scheduler, blocks and caches as in production, time by the costs given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel
from engine.fake_runner import FakeRunner, load_fake
from engine.plan import Plan, StepResult
from engine.stats import EngineStats


class Clock:
    """Seconds that pass only when something takes them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SimulatedGpu(FakeRunner):
    """The fake runner, with a cost for each block moved between device and host."""

    def __init__(self, config: EngineConfig, clock: Clock, seconds_per_block_copy: float) -> None:
        super().__init__(config, sleep=clock.advance)
        self._clock = clock
        self._seconds_per_block_copy = seconds_per_block_copy

    def execute(self, plan: Plan) -> StepResult:
        self._clock.advance(self._seconds_per_block_copy * (len(plan.swap_out) + len(plan.swap_in)))
        return super().execute(plan)


def simulated(config: EngineConfig, *, seconds_per_block_copy: float = 0.0) -> tuple[LLM, Clock]:
    clock = Clock()
    loaded = load_fake(config)
    runner = SimulatedGpu(config, clock, seconds_per_block_copy)
    model = LoadedModel(runner=runner, tokenizer=loaded.tokenizer, info=loaded.info)
    return LLM(model, config, clock=clock, wall_clock=clock), clock


@dataclass
class Ask:
    """One request of a load. Prompts of different `index` share no prefix."""

    index: int
    num_prompt_tokens: int
    params: SamplingParams
    arrival: float = 0.0  # seconds

    @property
    def prompt(self) -> dict[str, object]:
        head = [32 + (self.index * 7 + place * 13) % 90 for place in range(8)]
        own = [32 + (self.index + place) % 90 for place in range(max(0, self.num_prompt_tokens - 8))]
        return {"prompt_token_ids": (head + own)[: self.num_prompt_tokens]}


@dataclass
class Run:
    """What a load took. Latencies run from arrival to the last token, by `Ask.index`."""

    seconds: float
    num_tokens: int
    latencies: dict[int, float] = field(default_factory=dict)
    first_tokens: dict[int, float] = field(default_factory=dict)
    stats: list[EngineStats] = field(default_factory=list)  # after each step

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def serve(
    llm: LLM,
    clock: Callable[[], float],
    asks: list[Ask],
    *,
    idle: Callable[[float], None],
    static_batch: int | None = None,
) -> Run:
    """Runs a load to its end. `static_batch`: so many requests start together, and the next only when all have ended.

    `idle(seconds)` passes time while nothing is there to do.
    """
    began = clock()
    run = Run(0.0, 0)
    waiting = sorted(asks, key=lambda ask: ask.arrival)
    arrival_of = {str(ask.index): began + ask.arrival for ask in asks}
    while waiting or llm.has_unfinished():
        for ask in _starting(llm, waiting, clock() - began, static_batch):
            llm.add_request(str(ask.index), ask.prompt, ask.params)
        if not llm.has_unfinished():
            idle(max(0.0, began + waiting[0].arrival - clock()))
            continue
        for delta in llm.step():
            name, now = delta.request_id, clock()
            made = sum(len(choice.token_ids) for choice in delta.deltas)
            run.num_tokens += made
            if made:
                run.first_tokens.setdefault(int(name), now - arrival_of[name])
            if delta.finished:
                run.latencies[int(name)] = now - arrival_of[name]
        run.stats.append(llm.stats())
    run.seconds = clock() - began
    llm.check_integrity()
    return run


def _starting(llm: LLM, waiting: list[Ask], now: float, static_batch: int | None) -> Iterator[Ask]:
    """Takes from `waiting` what starts now."""
    if static_batch is not None and llm.has_unfinished():
        return
    count = 0
    while waiting and waiting[0].arrival <= now and (static_batch is None or count < static_batch):
        count += 1
        yield waiting.pop(0)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
