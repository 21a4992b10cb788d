"""The face of a request whose choices are known only at its end: beams, and the best of several candidates.

Nothing is told before, so a request that begins anew elsewhere has nothing to take back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.outputs import ChoiceDelta
from engine.streams import RequestStream

if TYPE_CHECKING:
    from engine.plan import Sampled
    from engine.sequence import Request, Sequence
    from engine.text.tokenizer import Tokenizer


class HeldBackStream(RequestStream):
    """Gathers what each sequence says; `outcome` tells the n best, the best one as choice 0."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        super().__init__(request, tokenizer)
        self._gathered = [ChoiceDelta(sequence.choice) for sequence in request.sequences]
        self._is_told = False

    @property
    def is_told(self) -> bool:
        return self._is_told

    def advance(self, sequence: Sequence, samples: list[Sampled], now: float) -> list[ChoiceDelta]:
        self._note_token(now)
        if self.request.beams is None:
            whole, delta = self._gathered[sequence.choice], self.choices[sequence.choice].advance(samples)
            whole.token_ids += delta.token_ids
            whole.text += delta.text
            if delta.logprobs is not None:
                whole.logprobs = (whole.logprobs or []) + delta.logprobs
        return []

    def outcome(self) -> list[ChoiceDelta]:
        """The n choices, once, where the request has ended."""
        if self._is_told or not self.request.is_finished:
            return []
        self._is_told = True
        is_aborted = any(sequence.finish_reason == "abort" for sequence in self.request.sequences)
        if is_aborted or self.request.beams is not None:
            return [self._beam(sequence) for sequence in self.request.sequences[: self.request.params.n]]
        return self._ranked()

    def ends(self) -> list[ChoiceDelta]:
        return self.outcome()

    def _beam(self, sequence: Sequence) -> ChoiceDelta:
        """The hypothesis that the sequence has become; the bare end where it has not."""
        delta = ChoiceDelta(sequence.choice)
        beams = self.request.beams
        if beams is not None and sequence.finish_reason in ("stop", "length"):
            hypothesis = beams.hypotheses[sequence.choice]
            delta.token_ids = hypothesis.token_ids
            delta.text = self.choices[sequence.choice].replay(hypothesis.token_ids)
            delta.logprobs = hypothesis.logprobs
            delta.cumulative_logprob, delta.score = hypothesis.cumulative_logprob, hypothesis.score
        self.choices[sequence.choice].end(delta)
        return delta

    def _ranked(self) -> list[ChoiceDelta]:
        """The n sequences with the highest mean logprob; those that failed are behind all others."""
        for whole in self._gathered:
            sequence = self.request.sequences[whole.index]
            whole.finish_reason, whole.stop_reason, whole.error = (
                sequence.finish_reason,
                sequence.stop_reason,
                sequence.error,
            )
            if whole.error is None and whole.logprobs:
                whole.cumulative_logprob = sum(position.chosen.logprob for position in whole.logprobs)
                whole.score = whole.cumulative_logprob / len(whole.logprobs)
            if self.request.params.logprobs is None:
                whole.logprobs = None
        ranked = sorted(self._gathered, key=lambda each: (each.score is None, -(each.score or 0.0), each.index))
        best = ranked[: self.request.params.n]
        for index, whole in enumerate(best):
            whole.index = index
        return best
