"""Takes the outcome of a step into the books: tokens, cached blocks, forks, ends. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.beam_committer import BeamCommitter
from engine.finish import finish_of
from engine.sequence import SequenceState
from engine.speculation.accept import num_accepted

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.plan import Plan, PositionLogprobs, Row, Sampled, StepResult
    from engine.roster import Roster
    from engine.sequence import Sequence
    from engine.speculation.speculator import Speculator


class StepCommitter:
    def __init__(self, roster: Roster, config: EngineConfig, speculator: Speculator | None) -> None:
        self._roster = roster
        self._speculator = speculator
        self._config = config
        self._beams = BeamCommitter(roster)

    def commit(self, plan: Plan, result: StepResult) -> dict[int, int]:
        """Returns how many samples of each row with proposals count, by the row's index in the plan."""
        num_taken: dict[int, int] = {}
        self._roster.tables.settle()
        decodes, chunks = plan.rows[: plan.num_decodes], plan.rows[plan.num_decodes :]
        samples = result.samples[: plan.num_decodes]
        if result.row_errors:
            for index, error in result.row_errors.items():
                self._fail_row(plan.rows[index], error)
            alive = [index for index, row in enumerate(decodes) if not row.sequence.is_finished]
            decodes, samples = [decodes[index] for index in alive], [samples[index] for index in alive]
        self._commit_decodes(decodes, samples)
        at = plan.num_decodes
        for index, row in enumerate(chunks, start=plan.num_decodes):
            samples, num_samples = result.samples[at : at + row.num_samples], row.num_samples
            if row.num_proposals:
                num_taken[index] = self._commit_proposals(row, samples)
            elif row.sequence.state is SequenceState.RUNNING:
                self._commit_chunk(row, samples, result.prompt_logprobs.get(index, []))
            at += num_samples
        self._beams.advance()
        return num_taken

    def _commit_decodes(self, rows: list[Row], samples: list[Sampled]) -> None:
        """The hot loop, well under a microsecond a row: only what fills its block or may end is looked at closer."""
        to_check: list[Row] = []
        others: list[tuple[Row, Sampled]] = []
        for row, sampled in zip(rows, samples, strict=True):
            token_id = sampled.token_id
            if token_id is None:
                others.append((row, sampled))
                continue
            sequence = row.sequence
            sequence.output_token_ids.append(token_id)
            row.token_ids[0] = token_id
            row.start = num_computed = row.start + 1
            sequence.num_computed_tokens = num_computed
            if num_computed >= sequence.check_at or token_id in sequence.request.stop_token_ids:
                to_check.append(row)
        for row, sampled in others:
            if row.sequence.request.beams is not None:
                self._beams.take(row, sampled, is_decode=True)
            else:
                self._roster.drop(row.sequence, "error", error=sampled.error or "no token was drawn")
        for row in to_check:
            self._check(row)

    def _check(self, row: Row) -> None:
        sequence = row.sequence
        self._roster.cache.register(sequence)
        finish = finish_of(sequence)
        if finish is not None:
            self._roster.drop(sequence, *finish)
        elif row.start == len(sequence.block_table) * self._roster.pool.block_size:
            self._roster.running.needy.append(row)
        else:  # its next block is there already
            self._roster.note_next_check(sequence)

    def _commit_proposals(self, row: Row, samples: list[Sampled]) -> int:
        """Output goes on with the accepted proposals and the target's own token, unless it ends before.

        Returns how many samples that is, a failed one included.
        """
        sequence = row.sequence
        if sequence.is_finished:
            return 1  # the row's forward failed, and every sample says so
        num_right, num_drafted = num_accepted(row.proposals, samples), row.start + row.num_proposals
        num_taken = 0
        for sampled in samples[: num_right + 1]:
            num_taken += 1
            if sampled.token_id is None:
                self._roster.drop(sequence, "error", error=sampled.error or "no token was drawn")
                break
            sequence.output_token_ids.append(sampled.token_id)
            row.start = sequence.num_computed_tokens = row.start + 1
            finish = finish_of(sequence)
            if finish is not None:
                self._roster.cache.register(sequence)
                self._roster.drop(sequence, *finish)
                break
        assert self._speculator is not None
        self._speculator.verified(row, num_accepted=num_right, num_drawn=num_taken)
        if not sequence.is_finished:
            row.token_ids[0] = sequence.output_token_ids[-1]
            row.withdraw_proposals()
            sequence.num_draft_tokens = min(num_drafted, row.start)
            self._roster.tables.shrink(sequence, row.start + 1)
            self._roster.cache.register(sequence)
            self._roster.running.needy.append(row)
        return num_taken

    def _commit_chunk(self, row: Row, samples: list[Sampled], prompt_logprobs: list[PositionLogprobs]) -> None:
        sequence = row.sequence
        request = sequence.request
        is_done = row.end == sequence.target
        sequence.num_computed_tokens = row.end
        if request.prompt_logprobs is not None:
            request.prompt_logprobs += prompt_logprobs  # the row asked for the next ones and no others
        self._roster.cache.register(sequence)
        if not is_done:
            return
        if sequence is request.trunk:
            self._roster.fork(sequence)
        for drawn, sampled in zip(row.draws, samples, strict=True):
            if request.beams is not None:
                self._beams.take(row, sampled, is_decode=False)
            else:
                self._begin_decode(drawn, sampled)
        while self._roster.running.num_seats_taken > self._config.max_num_seqs:
            last = max((each for each in self._roster.running if each.request is request), key=lambda each: each.order)
            self._roster.preempt(last, may_swap=False)

    def _begin_decode(self, sequence: Sequence, sampled: Sampled) -> None:
        """The first draw after a prompt, or after what was computed again."""
        if sampled.token_id is None:
            self._roster.drop(sequence, "error", error=sampled.error or "no token was drawn")
            return
        sequence.output_token_ids.append(sampled.token_id)
        finish = finish_of(sequence)
        if finish is not None:
            self._roster.drop(sequence, *finish)
        else:
            self._roster.running.needy.append(self._roster.running.begin_decode(sequence))

    def _fail_row(self, row: Row, error: str) -> None:
        """Its forward failed: so did every choice that depends on it."""
        if row.sequence.request.is_forked and row.sequence.request.beams is None:
            self._roster.drop(row.sequence, "error", error=error)
        else:
            self._roster.drop_all(row.sequence.request, "error", error=error)
