"""The face of a running request: turns the tokens of its choices into deltas, each thing told once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.outputs import ChoiceDelta, RequestDelta, Timeline
from engine.sequence import SequenceState
from engine.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from engine.plan import Sampled
    from engine.sequence import Request, Sequence
    from engine.text.tokenizer import Tokenizer


class ChoiceStream:
    """One choice: its text so far, and whether its end has been told."""

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer) -> None:
        """What the sequence has emitted already is replayed, not told; a stop string in it ends the sequence."""
        params = sequence.params
        self.sequence = sequence
        self.is_told = False
        self.num_tokens = 0  # drawn for it here, none behind a stop string
        self._detokenizer = Detokenizer(
            tokenizer,
            sequence.prompt_token_ids,
            params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        for token_id in sequence.output_token_ids:
            self._detokenizer.push(token_id)
        if self._detokenizer.stop_reason is not None:
            sequence.move_to(SequenceState.FINISHED)
            sequence.finish_reason, sequence.stop_reason = "stop", self._detokenizer.stop_reason

    def advance(self, samples: list[Sampled]) -> ChoiceDelta:
        """The delta of draws that the scheduler has committed together.

        Where the text now holds a stop string, `stop_string` says so, the delta is the last, and what was drawn behind
        it is not told: tell the scheduler.
        """
        sequence = self.sequence
        delta = ChoiceDelta(sequence.choice)
        for place, sampled in enumerate(samples, start=1):
            if sampled.token_id is None:
                break
            self.num_tokens += 1
            delta.token_ids.append(sampled.token_id)
            if sampled.logprobs is not None:
                delta.logprobs = [*(delta.logprobs or []), sampled.logprobs]
            is_stop = sequence.finish_reason == "stop" and place == len(samples)
            if not is_stop or sequence.params.include_stop_str_in_output:
                delta.text += self._detokenizer.push(sampled.token_id)  # a stop token is no text, unless asked for
            if self.stop_string is not None:
                if place < len(samples):  # whatever ended it behind the stop string did not come to pass
                    sequence.finish_reason = sequence.stop_reason = sequence.error = None
                break
        if sequence.is_finished or self.stop_string is not None:
            self.end(delta)
        return delta

    def replay(self, token_ids: list[int]) -> str:
        """The text of a whole output whose sequence has ended; what is held back comes with `end`."""
        sequence = self.sequence
        is_stop_token = sequence.finish_reason == "stop" and not isinstance(sequence.stop_reason, str)
        if is_stop_token and not sequence.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return "".join(map(self._detokenizer.push, token_ids))

    @property
    def stop_string(self) -> str | None:
        return self._detokenizer.stop_reason

    def end(self, delta: ChoiceDelta) -> None:
        """Adds the tail and the end. A stop string found on the last token outweighs the length."""
        sequence = self.sequence
        delta.text += self._detokenizer.flush()
        if self.stop_string is not None and sequence.finish_reason in (None, "length"):
            sequence.finish_reason, sequence.stop_reason = "stop", self.stop_string
        self.tell_end(delta)

    def tell_end(self, delta: ChoiceDelta) -> None:
        sequence = self.sequence
        delta.finish_reason, delta.stop_reason, delta.error = (
            sequence.finish_reason,
            sequence.stop_reason,
            sequence.error,
        )
        self.is_told = True


class RequestStream:
    """One request: collects what a step said about its choices into one RequestDelta."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.choices = [ChoiceStream(sequence, tokenizer) for sequence in request.sequences]
        self._has_told_prompt_logprobs = False
        self._first_token_at: float | None = None

    @property
    def is_told(self) -> bool:
        return all(choice.is_told for choice in self.choices)

    def advance(self, sequence: Sequence, samples: list[Sampled], now: float) -> list[ChoiceDelta]:
        """What a step's draws for one sequence, once committed, say at `now` of the engine's clock."""
        return [self.choices[sequence.choice].advance(samples)]

    def stop_string(self, sequence: Sequence) -> str | None:
        """The stop string that the sequence's text now holds: tell the scheduler."""
        return self.choices[sequence.choice].stop_string

    def outcome(self) -> list[ChoiceDelta]:
        """What is told only once all sequences have ended, and the step's draws are advanced."""
        return []

    def ends(self) -> list[ChoiceDelta]:
        """Deltas of choices that ended without a draw of this step: by abort, a failed forward."""
        deltas = []
        for choice in self.choices:
            if choice.sequence.is_finished and not choice.is_told:
                delta = ChoiceDelta(choice.sequence.choice)
                choice.end(delta)
                deltas.append(delta)
        return deltas

    def ends_emitted(self) -> list[ChoiceDelta]:
        """Deltas of choices that what they had emitted before they were added ended: their text was told then."""
        deltas = []
        for choice in self.choices:
            if choice.sequence.is_finished:
                delta = ChoiceDelta(choice.sequence.choice)
                choice.end(delta)  # its tail may hold a stop string
                delta.text = ""
                deltas.append(delta)
        return deltas

    def delta(self, deltas: list[ChoiceDelta], now: float) -> RequestDelta:
        request = self.request
        if any(delta.token_ids for delta in deltas):
            self._note_token(now)
        told = RequestDelta(request.request_id, deltas, request.num_prompt_tokens, request.num_cached_tokens)
        known = request.prompt_logprobs
        if known is not None and len(known) == request.num_prompt_tokens and not self._has_told_prompt_logprobs:
            told.prompt_logprobs = known
            self._has_told_prompt_logprobs = True
        if self.is_told:
            told.finished = True
            told.timeline = self._timeline(now)
        return told

    def _note_token(self, now: float) -> None:
        if self._first_token_at is None:
            self._first_token_at = now

    def _timeline(self, now: float) -> Timeline:
        request = self.request
        started = now if request.first_scheduled is None else request.first_scheduled
        first_token = now if self._first_token_at is None else self._first_token_at
        return Timeline(
            queued_seconds=started - request.arrival,
            prefill_seconds=first_token - started,
            decode_seconds=now - first_token,
            num_preemptions=request.num_preemptions,
            num_swaps=request.num_swaps,
            num_cached_tokens=request.num_cached_tokens,
            num_drafted_tokens=request.num_drafted_tokens,
            num_accepted_tokens=request.num_accepted_tokens,
        )
