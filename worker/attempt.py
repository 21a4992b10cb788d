"""One job in this worker's hands: what it has emitted, what of that is not published yet, how it is to end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from infra.contracts import ChoiceDelta, Claim, EventBody, Hold, Job, Outcome, Publication
from infra.keys import lane_of
from worker.progress import Progress, joined


class Phase(StrEnum):
    STARTING = "starting"  # its request is being built
    RUNNING = "running"  # in the engine
    LEAVING = "leaving"  # its abort is under way, because it is to be given back; its deltas count until then
    ENDING = "ending"  # out of the engine; its end is being written
    OVER = "over"  # written, or no longer ours


@dataclass(frozen=True, slots=True)
class Commit:
    """End of the job."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class GiveBack:
    """End of this attempt alone; the job goes on elsewhere, or here."""

    reason: str  # "hand_over" or "retry"
    delay_seconds: float = 0.0


class Attempt:
    """Belongs to the event loop's thread."""

    def __init__(self, claim: Claim) -> None:
        self.job: Job = claim.job
        self.hold: Hold = claim.hold
        self.lane = lane_of(claim.job.id)
        self.request_id = f"{claim.job.id}/{claim.job.attempt}"  # a lost job may come back before its abort is done
        self.history = claim.history
        self.phase = Phase.STARTING
        self.end: Commit | GiveBack | None = None
        self.progress = Progress.of(0, claim.history)  # until its parameters say how many choices there are
        self.is_accepted = False  # the engine's figures count it
        self.errors: dict[int, str] = {}  # by choice: why it failed alone
        self.has_emitted = False  # its prompt is computed
        self.is_silent = True  # nothing of it was sent to the store yet: a client may wait for the first token
        self._counts_untold = False
        self._pending: dict[int, ChoiceDelta] = {}
        self._next_number = claim.job.num_events
        self._in_flight: Publication | None = None

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def num_sequences(self) -> int:
        """Sequences that it keeps busy in the engine; one, while its parameters are not read."""
        return sum(choice.finish_reason is None for choice in self.progress.choices) + self._num_spare_candidates or 1

    @property
    def remaining_tokens(self) -> list[int]:
        """Output tokens that each sequence may still draw."""
        spec = self.job.spec
        each = spec.output_tokens // spec.num_sequences
        if not self.progress.choices:
            return [each]
        open_choices = [choice for choice in self.progress.choices if choice.finish_reason is None]
        left = [max(0, each - len(choice.token_ids)) for choice in open_choices]
        return left + [each] * self._num_spare_candidates

    @property
    def _num_spare_candidates(self) -> int:
        """Sequences beside those that the choices are named after, as long as it is not known which become choices."""
        choices = self.progress.choices
        is_open = bool(choices) and not self.progress.is_finished
        return max(0, self.job.spec.num_sequences - len(choices)) if is_open else 0

    @property
    def prompt_tokens_left(self) -> int:
        """Tokens to be computed before the first can be drawn; all of them, until it is."""
        if self.has_emitted:
            return 0
        output_tokens = min(self.job.spec.output_tokens, self.job.cost_tokens)
        return self.job.cost_tokens - output_tokens + self.progress.num_completion_tokens

    @property
    def num_retries(self) -> int:
        """How often the job was given back because something failed."""
        return sum(event.body.reason == "retry" for event in self.history if event.type == "job.requeued")

    @property
    def was_lost_before(self) -> bool:
        """Whether the attempt before this one lost its lease."""
        requeues = [event for event in self.history if event.type == "job.requeued"]
        return bool(requeues) and requeues[-1].body.reason == "lease_lost"

    def count_prompt(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Notes the prompt's length; the job's first delta event says it."""
        self._counts_untold |= self.progress.count_prompt(num_prompt_tokens, num_cached_tokens)

    def add(self, delta: ChoiceDelta) -> None:
        """Takes one choice's new tokens, to be published with the next flush."""
        self.has_emitted = True
        self.progress.choices[delta.index].extend(delta)
        before = self._pending.get(delta.index)
        self._pending[delta.index] = delta if before is None else joined(before, delta)

    def take_publication(self) -> Publication | None:
        """What is not published yet, as one event; the same again until `published` says that it is written."""
        if self._in_flight is None and self._pending:
            body = EventBody(
                attempt=self.hold.attempt, deltas=[self._pending[index] for index in sorted(self._pending)]
            )
            if self._counts_untold:
                body.num_prompt_tokens = self.progress.num_prompt_tokens
                body.num_cached_tokens = self.progress.num_cached_tokens
            self._in_flight = Publication(hold=self.hold, events=[body], first_number=self._next_number)
            self.is_silent = False
            self._pending = {}
            self._counts_untold = False
        return self._in_flight

    def take_last_publication(self) -> Publication:
        """What the commit takes along: also with nothing to add, it names the number at which our log must stand.

        A server that failed over may have lost events that it had acknowledged; without the number it would take a
        whole result for a log that lacks some.
        """
        return self.take_publication() or Publication(hold=self.hold, events=[], first_number=self._next_number)

    def published(self) -> None:
        """The publication taken last is in the job's log."""
        if self._in_flight is None:
            raise ValueError(f"{self.hold}: nothing was taken to be published")
        self._next_number += len(self._in_flight.events)
        self._in_flight = None
