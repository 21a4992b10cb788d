"""Executes a plan so that one bad row costs only itself: a forward that raises is tried again in halves.

A device that fails at anything is no request's fault: then nothing is ended, and DeviceFailed says so.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import DeviceFailed
from engine.plan import BlockMove, Plan, PositionLogprobs, Sampled, StepResult

if TYPE_CHECKING:
    from engine.plan import Row, Runner
    from engine.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 8  # rows that failed with none succeeding between: then it is the device, not the requests


@dataclass(slots=True)
class _RowOutcome:
    samples: list[Sampled]
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    error: str | None = None


class IsolatingExecutor:
    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.num_failed_rows = 0
        self._runner = runner
        self._scheduler = scheduler
        self._num_failures_in_a_row = 0

    def execute(self, plan: Plan) -> tuple[Plan, StepResult]:
        """Executes the scheduler's plan; returns what to commit, which is another plan where it failed at first.

        Raises DeviceFailed where nothing succeeds any more.
        """
        try:
            result = self._runner.execute(plan)
        except DeviceFailed:
            raise
        except Exception:
            return self.recover(plan)
        self.succeeded(plan)
        return plan, result

    def succeeded(self, plan: Plan) -> None:
        """A plan was executed whole."""
        if plan.rows:
            self._num_failures_in_a_row = 0

    def recover(self, plan: Plan) -> tuple[Plan, StepResult]:
        """Call where the plan's execution has just raised. Returns what to commit instead, tried in parts."""
        log.exception("step %d failed; trying its %d rows in parts", plan.step_index, len(plan.rows))
        self._check_device()
        rest = self._scheduler.abandon(plan)
        return rest, self._merged(self._try(rest, 0, len(rest.rows)))

    def _check_device(self) -> None:
        """Tells a request's fault from the device's: a device that still works can copy a block onto itself."""
        try:
            self._runner.execute(Plan(0, copies=[BlockMove(0, 0)]))
        except Exception as error:
            raise DeviceFailed(f"the device does not even copy a block any more: {error}") from error

    def _try(self, plan: Plan, start: int, end: int) -> list[_RowOutcome]:
        """Outcomes of rows start..end. KV before each row's start is as it was, so a row may be computed again."""
        if start == end:
            return []
        rows = plan.rows[start:end]
        part = Plan(plan.step_index, rows, num_decodes=max(0, min(plan.num_decodes, end) - start))
        try:
            result = self._runner.execute(part)
        except DeviceFailed:
            raise
        except Exception as error:
            if len(rows) == 1:
                return [self._failure(rows[0], error)]
            middle = (start + end) // 2
            return self._try(plan, start, middle) + self._try(plan, middle, end)
        self._num_failures_in_a_row = 0
        outcomes, at = [], 0
        for index, row in enumerate(rows):
            samples = result.samples[at : at + row.num_samples]
            outcomes.append(_RowOutcome(samples, result.prompt_logprobs.get(index, [])))
            at += row.num_samples
        return outcomes

    def _failure(self, row: Row, error: Exception) -> _RowOutcome:
        self.num_failed_rows += 1
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise DeviceFailed(
                f"{self._num_failures_in_a_row} requests failed in a row, the last with: {error}"
            ) from error
        message = f"the forward pass failed: {type(error).__name__}: {error}"
        log.error("request %s: %s", row.sequence.request.request_id, message)
        return _RowOutcome([Sampled(None, error=message)] * row.num_samples, error=message)

    def _merged(self, outcomes: list[_RowOutcome]) -> StepResult:
        result = StepResult([])
        for index, outcome in enumerate(outcomes):
            result.samples += outcome.samples
            if outcome.prompt_logprobs:
                result.prompt_logprobs[index] = outcome.prompt_logprobs
            if outcome.error is not None:
                result.row_errors[index] = outcome.error
        return result
