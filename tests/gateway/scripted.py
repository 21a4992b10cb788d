"""A worker without an engine: a client of the store that claims jobs and answers them from a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from api_gateway.tasks import end
from infra.contracts import (
    Choice,
    ChoiceDelta,
    Claim,
    EventBody,
    JobError,
    Outcome,
    PositionLogprobs,
    Publication,
    Result,
    TokenLogprob,
    Usage,
)
from infra.errors import StoreUnavailable
from infra.states import Status
from infra.store import JobStore

WORDS = ["alpha", " beta", " gamma", " délta", " 🙂", " zeta"]
LEASE_SECONDS = 30.0


def text_of(num_tokens: int) -> str:
    """What the worker answers in so many tokens."""
    return "".join(WORDS[index % len(WORDS)] for index in range(num_tokens))


async def until(condition: Callable[[], bool]) -> None:
    """Waits, not for ever, until something has come about."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came about")


class FaultyStore:
    """A store some of whose methods fail, as they do when its server is gone or its memory is full."""

    def __init__(self, store: JobStore, refused: set[str]) -> None:
        self.store = store
        self.refused = refused

    def __getattr__(self, name: str) -> Any:
        if name in self.refused:
            return self._refuse
        return getattr(self.store, name)

    async def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise StoreUnavailable("the store refuses this: injected")


@dataclass
class ScriptedWorker:
    """Runs every job of a lane. A prompt with FAIL in it fails.

    A closed `gate` holds it before each token, or only before token `hold_at`.
    """

    store: JobStore
    lane: int
    profile: str = "scripted"
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    hold_at: int | None = None
    num_tokens_emitted: int = 0
    claimed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    async def serve(self) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                claim = await self.store.claim(
                    self.lane, "scripted", free_tokens=None, lease_seconds=LEASE_SECONDS, profile=self.profile
                )
                if claim is None:
                    await self.store.wait_for_work([self.lane], timeout=1.0)
                    continue
                self.claimed.append(claim.job.id)
                task = asyncio.create_task(self._run(claim))
                running.add(task)
                task.add_done_callback(running.discard)
        finally:
            await end(*running)

    async def _run(self, claim: Claim) -> None:
        spec, params = claim.job.spec, claim.job.spec.params
        text = spec.prompt or "".join(message.content for message in spec.messages or [])
        num_prompt_tokens = len(spec.prompt_token_ids or text.encode())
        if "FAIL" in text:
            error = JobError(code="engine_error", message="the script says so")
            await self.store.commit(claim.hold, Outcome(status=Status.FAILED, error=error))
            return
        n, max_tokens = params.get("n", 1), params["max_tokens"]
        choices = [Choice(index=index, text="", token_ids=[], finish_reason="length") for index in range(n)]
        for step in range(max_tokens):
            if self.hold_at in (None, step):
                await self.gate.wait()
            deltas = [self._delta(params, choice, step, step == max_tokens - 1) for choice in choices]
            body = EventBody(attempt=claim.job.attempt, deltas=deltas, num_prompt_tokens=num_prompt_tokens)
            if await self.store.publish(self.lane, [Publication(hold=claim.hold, events=[body])]):
                return
            self.num_tokens_emitted += n
        usage = Usage(prompt_tokens=num_prompt_tokens, completion_tokens=n * max_tokens, cached_tokens=3)
        outcome = Outcome(
            status=Status.SUCCEEDED, result=Result(choices=choices), usage=usage, timeline={"decode_seconds": 0.5}
        )
        await self.store.commit(claim.hold, outcome)

    def _delta(self, params: dict[str, object], choice: Choice, step: int, is_last: bool) -> ChoiceDelta:
        word = WORDS[step % len(WORDS)]
        logprobs = None
        if params.get("logprobs") is not None:
            chosen = TokenLogprob(token_id=step, token=word, logprob=-0.25)
            top = [chosen, TokenLogprob(token_id=99, token="no", logprob=float("-inf"))]
            logprobs = [PositionLogprobs(chosen=chosen, top=top[: int(str(params["logprobs"]))])]
            choice.logprobs = (choice.logprobs or []) + logprobs
        choice.text += word
        choice.token_ids.append(step)
        return ChoiceDelta(
            index=choice.index,
            text=word,
            token_ids=[step],
            logprobs=logprobs,
            finish_reason="length" if is_last else None,
        )
