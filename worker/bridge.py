"""Job <-> request: turns claims into engine requests, and what the engine reports into what is to be written.

The one place that knows which attempts this worker has. Everything here runs in the event loop and never waits for the
engine; how an attempt moves:

    STARTING -> RUNNING -> ENDING -> OVER           a job runs through
    RUNNING  -> LEAVING -> ENDING -> OVER           it is given back (drain)
    any      -> OVER                                it was lost: cancelled, expired, or claimed by another
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from engine.outputs import RequestDelta
from infra.contracts import Claim, Hold, JobError, Outcome
from infra.errors import BlobUnavailable, UnknownBlob
from infra.states import Status
from infra.store import JobStore
from worker.attempt import Attempt, Commit, GiveBack, Phase
from worker.engine_thread import Abort, Add, EngineThread, Report
from worker.lease import LeaseKeeper
from worker.observer import Observer
from worker.payloads import Payloads, large_result
from worker.progress import Progress
from worker.publisher import Publisher, Spawn
from worker.retry import Fail, Failure, HandOver, Retry, decide
from worker.translate import (
    choice_delta,
    failed_outcome,
    is_foreign,
    outcome_of,
    params_of,
    position_logprobs,
    prompt_of,
    timeline_of,
)

if TYPE_CHECKING:
    from engine.guided.compiler import GrammarCompiler
    from engine.params import SamplingParams
    from engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Bridge:
    def __init__(
        self,
        *,
        store: JobStore,
        engine: EngineThread,
        leases: LeaseKeeper,
        payloads: Payloads,
        tokenizer: Tokenizer,
        grammars: GrammarCompiler,
        profile: str,
        observer: Observer,
        spawn: Spawn,
        flush_seconds: float,
        bell: asyncio.Event,
    ) -> None:
        """`bell` is rung when an attempt leaves room for another."""
        self.attempts: dict[str, Attempt] = {}  # by request id; none of them is over
        self.is_empty = asyncio.Event()  # no attempts
        self.is_empty.set()
        self._engine = engine
        self._leases = leases
        self._payloads = payloads
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._profile = profile
        self._observer = observer
        self._spawn = spawn
        self._bell = bell
        self._publisher = Publisher(store, self, spawn, flush_seconds=flush_seconds)

    # --- from the consumer ---

    def take(self, claim: Claim) -> None:
        attempt = Attempt(claim)
        self.attempts[attempt.request_id] = attempt
        self.is_empty.clear()
        self._leases.hold(attempt.hold)
        self._observer.claimed(attempt)
        self._spawn(self._begin(attempt))

    def drop_jobs(self, job_ids: Iterable[str]) -> None:
        """These jobs have ended without us: cancelled, or expired."""
        ended = set(job_ids)
        self._lose_unless_ending(attempt for attempt in self.attempts.values() if attempt.job.id in ended)

    # --- from the lease keeper ---

    def drop_holds(self, holds: Iterable[Hold]) -> None:
        lost = set(holds)
        self._lose_unless_ending(attempt for attempt in self.attempts.values() if attempt.hold in lost)

    # --- from the engine ---

    def report(self, report: Report) -> None:
        self._observer.stepped(report)
        for request_id in report.accepted:
            if attempt := self.attempts.get(request_id):
                attempt.is_accepted = True
        for request_id, error in report.refused.items():
            if attempt := self.attempts.get(request_id):
                if isinstance(error, InvalidRequest):
                    self._fail(attempt, Failure.REQUEST, error.message, param=error.param)
                else:
                    self._fail(attempt, Failure.ENGINE, f"the engine cannot take it: {type(error).__name__}")
        for delta in report.deltas:
            self._emit(delta)
        for request_id in report.aborted:
            attempt = self.attempts.get(request_id)
            if attempt and attempt.phase is Phase.LEAVING:
                self._end(attempt, GiveBack("hand_over"))

    def engine_failed(self, error: BaseException) -> None:
        """The engine is gone, and everything that was in it with it."""
        for attempt in list(self.attempts.values()):
            if attempt.phase in (Phase.RUNNING, Phase.LEAVING):
                self._fail(attempt, Failure.ENGINE, f"the engine failed while it ran this job: {error}")
            elif attempt.phase is Phase.STARTING:
                self._end(attempt, GiveBack("hand_over"))

    # --- from the drain ---

    def hand_over_all(self) -> None:
        """Gives back whatever is not ending yet, with all it has emitted."""
        for attempt in list(self.attempts.values()):
            if attempt.phase is Phase.STARTING:
                self._end(attempt, GiveBack("hand_over"))
            elif attempt.phase is Phase.RUNNING:
                attempt.phase = Phase.LEAVING
                self._engine.send(Abort(attempt.request_id))

    # --- from the publisher ---

    def attempt_refused(self, attempt: Attempt) -> None:
        self._lose(attempt)

    def attempt_ended(self, attempt: Attempt) -> None:
        self._forget(attempt)
        self._observer.ended(attempt)

    # --- the way of an attempt ---

    async def _begin(self, attempt: Attempt) -> None:
        """Reads the job, as far as that may wait or takes time."""
        try:
            spec = await self._payloads.spec_of(attempt.job)
            params = params_of(spec, attempt.job.id)
            attempt.progress = Progress.of(params.n, attempt.history)
            prompt = await asyncio.to_thread(prompt_of, spec, self._tokenizer, created_ms=attempt.job.created_ms)
            if params.guided is not None:  # the engine's thread then finds it compiled
                await asyncio.to_thread(self._grammars.compile, params.guided)
        except InvalidRequest as error:
            self._fail(attempt, Failure.REQUEST, error.message, param=error.param)
        except BlobUnavailable as error:
            self._fail(attempt, Failure.PAYLOAD, error.message)
        except UnknownBlob as error:
            self._fail(attempt, Failure.MISSING, error.message)
        except Exception as error:  # ours to mend; a job that provokes it must not take the worker along
            log.exception("%s cannot be read", attempt.request_id)
            self._fail(attempt, Failure.ENGINE, f"reading the job failed: {type(error).__name__}")
        else:
            self._start(attempt, prompt, params, salt=spec.salt)

    def _start(self, attempt: Attempt, prompt: list[int], params: SamplingParams, *, salt: str) -> None:
        progress = attempt.progress
        if attempt.phase is not Phase.STARTING:  # lost or given back meanwhile
            return
        if progress.num_completion_tokens and is_foreign(attempt.job, self._profile):
            self._fail(
                attempt, Failure.WEIGHTS, "it was begun under other weights than this model now has; submit it again"
            )
            return
        if progress.is_finished:  # an earlier attempt got everything but its end written
            self._end(attempt, Commit(outcome_of(progress, timeline={}, errors={})))
            return
        attempt.phase = Phase.RUNNING
        emitted = None if params.is_held_back else progress.emitted  # told whole at the end: it starts anew
        self._engine.send(Add(attempt.request_id, prompt, params, salt, attempt.job.tenant, emitted))

    def _emit(self, delta: RequestDelta) -> None:
        """Takes what a step emitted for one request; deltas of an attempt that is lost go nowhere."""
        attempt = self.attempts.get(delta.request_id)
        if attempt is None or attempt.phase not in (Phase.RUNNING, Phase.LEAVING):
            return
        attempt.count_prompt(delta.num_prompt_tokens, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            attempt.progress.prompt_logprobs = [
                position and position_logprobs(position, self._token_text) for position in delta.prompt_logprobs
            ]
        for choice in delta.deltas:
            if attempt.progress.choices[choice.index].finish_reason is not None:
                continue  # an earlier attempt said it
            attempt.add(choice_delta(choice, self._token_text))
            if choice.error is not None:
                attempt.errors[choice.index] = choice.error
        self._observer.emitted(attempt, sum(len(choice.token_ids) for choice in delta.deltas))
        if delta.finished:
            outcome = outcome_of(attempt.progress, timeline=timeline_of(delta.timeline), errors=attempt.errors)
            self._end(attempt, Commit(outcome))
        else:
            self._publisher.touch(attempt)

    def _fail(self, attempt: Attempt, failure: Failure, message: str, *, param: str | None = None) -> None:
        if attempt.phase in (Phase.ENDING, Phase.OVER):
            return
        told = "" if failure is Failure.REQUEST else message  # a caller's own words stay out of the log
        log.warning("%s failed: %s %s", attempt.request_id, failure, told)
        match decide(failure, attempt.num_retries, jitter=random.random()):
            case Fail(code):
                error = JobError(code=code, message=message, param=param)
                self._end(attempt, Commit(failed_outcome(attempt.progress, error)))
            case Retry(delay_seconds):
                self._end(attempt, GiveBack("retry", delay_seconds))
            case HandOver():
                self._end(attempt, GiveBack("hand_over"))

    def _end(self, attempt: Attempt, end: Commit | GiveBack) -> None:
        attempt.phase = Phase.ENDING
        self._bell.set()
        packed = large_result(end.outcome) if isinstance(end, Commit) else None
        if isinstance(end, Commit) and packed is not None:
            self._spawn(self._check_in(attempt, end.outcome, packed))
        else:
            attempt.end = end
            self._publisher.touch(attempt)

    async def _check_in(self, attempt: Attempt, outcome: Outcome, packed: bytes) -> None:
        """Puts a large result where the outcome can name it, then ends the attempt; keeps trying as the table says."""
        for num_retries in count():
            try:
                attempt.end = Commit(await self._payloads.check_in(attempt.hold, outcome, packed))
                break
            except BlobUnavailable as error:
                match decide(Failure.PAYLOAD, num_retries):
                    case Retry(delay_seconds):
                        log.warning("%s: its result waits: %s", attempt.hold, error)
                        await asyncio.sleep(delay_seconds)
                    case Fail(code):
                        lost = JobError(code=code, message=f"the result could not be kept: {error}")
                        attempt.end = Commit(Outcome(status=Status.FAILED, usage=outcome.usage, error=lost))
                        break
            if attempt.is_over:
                return
        self._publisher.touch(attempt)

    def _lose_unless_ending(self, attempts: Iterable[Attempt]) -> None:
        """One that is ending is left alone: what was heard may be its own end, whose answer is on its way."""
        for attempt in list(attempts):
            if attempt.phase is not Phase.ENDING:
                self._lose(attempt)

    def _lose(self, attempt: Attempt) -> None:
        if attempt.phase in (Phase.RUNNING, Phase.LEAVING):
            self._engine.send(Abort(attempt.request_id))
        self._forget(attempt)
        self._observer.lost(attempt)

    def _forget(self, attempt: Attempt) -> None:
        attempt.phase = Phase.OVER
        self._leases.drop(attempt.hold)
        del self.attempts[attempt.request_id]
        self._bell.set()
        if not self.attempts:
            self.is_empty.set()

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
