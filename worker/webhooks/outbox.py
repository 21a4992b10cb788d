"""From a message to its end: count the try, sign, send, decide, write down.

Whoever holds the message deletes it only after `Courier.tell` has said that it is done, so a dispatcher that dies on
the way is followed by one that tells the same message again, under the same `webhook-id`.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from infra.telemetry import Attributes, Telemetry
from worker.webhooks import signing
from worker.webhooks.delivery import Sender
from worker.webhooks.event import Message
from worker.webhooks.ledger import Fate, Ledger
from worker.webhooks.schedule import Answer, Answered, Decision, Delivered, GiveUp, TryAgain, decide
from worker.webhooks.slots import Slots, WaitingRoom, endpoint_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Done:
    """The message needs no further try: it was delivered, or given up and kept as a dead letter."""

    outcome: str  # "delivered", "dead" or "known": it had ended before, and only its deletion was lost


@dataclass(frozen=True, slots=True)
class Later:
    """The message has to be told again after so long."""

    after_seconds: float


class Courier:
    """Tells messages, each as often as its schedule says."""

    def __init__(self, sender: Sender, ledger: Ledger, slots: Slots, *, secrets: Sequence[str],
                 schedule: list[float], wait_seconds: float, telemetry: Telemetry) -> None:  # fmt: skip
        """A message waits at most `wait_seconds` for a slot before it is put back into the store."""
        self._sender = sender
        self._ledger = ledger
        self._secrets = list(secrets)
        self._schedule = schedule
        self._room = WaitingRoom(slots)
        self._wait_seconds = wait_seconds
        self._telemetry = telemetry

    async def tell(self, message: Message) -> Done | Later:
        """One try, when the endpoint has a free slot.

        Raises StoreUnavailable where it could not be counted (then nothing was sent) or not be written down.
        """
        endpoint = endpoint_of(message.url)
        if not await self._room.take(endpoint, timeout_seconds=self._wait_seconds):
            return Later(self._room.patience_seconds(endpoint))
        answered = True
        try:
            num_tries, fate = await self._ledger.begin_try(message)
            if fate is not Fate.OPEN:
                return Done("known")
            answer = await self._send(message, num_tries)
            answered = isinstance(answer, Answered)
        finally:
            self._room.give_back(endpoint, answered=answered)
        decision = decide(answer, num_tries=num_tries, schedule=self._schedule, random=random.random())
        return await self._write_down(message, decision, num_tries)

    async def _send(self, message: Message, num_tries: int) -> Answer:
        attributes: Attributes = {"messaging.message.id": message.id, "millstream.webhook.try": num_tries}
        with self._telemetry.span(
            f"deliver {message.type}", kind="client", parent=message.traceparent, attributes=attributes
        ) as span:
            headers = signing.headers(message.id, int(time.time()), message.body, self._secrets)
            if span.traceparent:
                headers["traceparent"] = span.traceparent
            answer = await self._sender.send(message.url, message.body, headers)
            if isinstance(answer, Answered):
                span.set({"http.response.status_code": answer.status})
                if answer.status >= 400:
                    span.fail(str(answer.status))
            else:
                span.fail("no_answer")
        return answer

    async def _write_down(self, message: Message, decision: Decision, num_tries: int) -> Done | Later:
        now_ms = time.time_ns() // 1_000_000
        match decision:
            case Delivered(status):
                await self._ledger.note(message, Fate.DELIVERED, f"the endpoint answered {status}", now_ms=now_ms)
                return Done("delivered")
            case GiveUp(reason):
                log.warning("webhook %s (%s) given up after try %d: %s", message.id, message.type, num_tries, reason)
                await self._ledger.note(message, Fate.DEAD, reason, now_ms=now_ms)
                return Done("dead")
            case TryAgain(after_seconds, reason):
                log.info("webhook %s try %d: %s; again in %.1f s", message.id, num_tries, reason, after_seconds)
                await self._ledger.note(message, Fate.OPEN, reason, now_ms=now_ms)
                return Later(after_seconds)
