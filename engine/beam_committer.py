"""Takes the proposals of beams into the books: once all beams of a request have proposed, they move on together. Pure.

sequences   0  1  2      tables and tokens of the next beams are those of their parents, and one token more;
parents     1  1  0      no block is copied here, and beam 2's blocks are let go
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.plan import Row, Sampled
    from engine.roster import Roster
    from engine.sequence import Request, Sequence

_NO_HYPOTHESIS = "the request's own settings leave fewer continuations than it asks for"


class BeamCommitter:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._rows: dict[Sequence, Row] = {}  # of this step's decoding beams
        self._ready: list[Request] = []

    def take(self, row: Row, sampled: Sampled, *, is_decode: bool) -> None:
        """One beam's proposal, from a decoding row or the end of a chunk.

        A beam that fails ends its request, whose outcome can no longer be known.
        """
        sequence = row.sequence
        request = sequence.request
        if sequence.is_finished:
            return
        if sampled.candidates is None:
            self._roster.drop_all(request, "error", error=sampled.error or "no continuation was named")
            return
        assert request.beams is not None
        sequence.num_computed_tokens = row.end
        self._roster.cache.register(sequence)
        if is_decode:
            self._rows[sequence] = row
        request.beams.propose(sequence.choice, sampled.candidates)
        if request.beams.is_ready:
            self._ready.append(request)

    def advance(self) -> None:
        """Moves on, or ends, every request whose beams have all proposed. Ends the step."""
        for request in self._ready:
            if not request.is_finished:
                self._advance(request)
        self._ready.clear()
        self._rows.clear()

    def _advance(self, request: Request) -> None:
        assert request.beams is not None
        sequences = request.sequences
        outputs = [sequence.output_token_ids for sequence in sequences]
        branches = request.beams.advance(outputs)
        if not branches:
            self._end(request)
            return
        self._roster.tables.regroup(sequences, [branch.parent for branch in branches])
        for sequence, branch in zip(sequences, branches, strict=True):
            sequence.output_token_ids = [*outputs[branch.parent], branch.token_id]
        for sequence in sequences:
            self._roster.running.needy.append(self._next_row(sequence))

    def _next_row(self, sequence: Sequence) -> Row:
        row = self._rows.get(sequence)
        if row is None:
            return self._roster.running.begin_decode(sequence)
        row.start = sequence.num_computed_tokens
        row.token_ids = sequence.output_token_ids[-1:]
        row.block_table = sequence.block_table
        return row

    def _end(self, request: Request) -> None:
        """Sequence i becomes hypothesis i."""
        assert request.beams is not None
        hypotheses = request.beams.hypotheses
        for sequence in request.sequences:
            if sequence.choice < len(hypotheses):
                hypothesis = hypotheses[sequence.choice]
                sequence.output_token_ids = hypothesis.token_ids
                self._roster.drop(sequence, hypothesis.finish_reason, hypothesis.stop_reason)
            else:
                self._roster.drop(sequence, "error", error=_NO_HYPOTHESIS)
