"""How a step is started without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from engine.plan import Plan, Row, Sampled, StepResult

if TYPE_CHECKING:
    from engine.plan import Runner


class Launched(Protocol):
    """A step under way."""

    def result(self) -> StepResult:
        """Waits for it. Raises what the step raised."""


@runtime_checkable
class Launcher(Protocol):
    def launch(self, plan: Plan) -> Launched:
        """Starts a plan; of what was launched before, it sees all effects. A row may follow a draw of the last one."""


class HostLauncher:
    """Launches on a runner that has done everything when it returns: nothing is gained, and nothing else changes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last: list[Sampled] | None = None  # None: the last step failed

    def launch(self, plan: Plan) -> Launched:
        try:
            if self._last is None and any(row.follows is not None for row in plan.rows):
                raise RuntimeError("this step follows one that failed")
            rows = [_resolved(row, self._last or []) for row in plan.rows]
            result = self._runner.execute(replace(plan, rows=rows))
        except Exception as error:
            self._last = None
            return FailedStep(error)
        self._last = result.samples
        return _Done(result)


def _resolved(row: Row, last: Listed[Sampled]) -> Row:
    """The row with the token that it follows; any token will do where there was none: the row is void then."""
    if row.follows is None:
        return row
    return replace(row, token_ids=[last[row.follows].token_id or 0])


@dataclass(frozen=True, slots=True)
class _Done:
    found: StepResult

    def result(self) -> StepResult:
        return self.found


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A step that did not even start."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error
