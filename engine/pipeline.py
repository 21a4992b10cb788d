"""Hands out executed steps one after another; where it may, the next step is under way before one is handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import DeviceFailed, EngineError

if TYPE_CHECKING:
    from engine.ahead_planner import AheadPlan
    from engine.isolation import IsolatingExecutor
    from engine.launcher import Launched, Launcher
    from engine.plan import Plan, StepResult
    from engine.scheduler import Scheduler


class StepPipeline:
    """`launcher`: None where no step is to overlap another."""

    def __init__(self, scheduler: Scheduler, executor: IsolatingExecutor, launcher: Launcher | None) -> None:
        self.num_ahead = 0  # steps that were launched before the one before them was done
        self._scheduler, self._executor, self._launcher = scheduler, executor, launcher
        self._ahead: tuple[AheadPlan, Launched] | None = None

    def next(self, now: float) -> tuple[Plan, StepResult]:
        """The next step's plan and outcome, to be committed. A plan may have lost all its rows: then nothing happened.

        Raises DeviceFailed where no request can be computed any more.
        """
        if self._launcher is None:
            return self._executor.execute(self._full_plan(now))
        try:
            return self._next_of(self._launcher, now)
        except BaseException:
            self._ahead = None
            raise

    def _next_of(self, launcher: Launcher, now: float) -> tuple[Plan, StepResult]:
        plan: Plan
        if self._ahead is not None:
            (plan, launched), self._ahead = self._ahead, None
            self._scheduler.begin(plan)
        else:
            plan = self._full_plan(now)
            launched = launcher.launch(plan)
        ahead = self._scheduler.plan_ahead()
        if ahead is not None:
            self._ahead = ahead, launcher.launch(ahead)
            self.num_ahead += 1
        try:
            result = launched.result()
        except DeviceFailed:
            raise
        except Exception:
            self._ahead = None  # what it computed follows from nothing, and is computed again
            return self._executor.recover(plan)
        self._executor.succeeded(plan)
        return self._scheduler.landed(plan, result)

    def _full_plan(self, now: float) -> Plan:
        plan = self._scheduler.plan(now)
        if plan.is_empty:
            raise EngineError(f"the scheduler found nothing to do for {self._scheduler.num_requests} requests")
        return plan
