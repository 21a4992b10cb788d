"""The plan: what the scheduler decides for one step, as plain data.

A runner applies a plan in this order: `swap_out`, `swap_in`, `copies`, then the forward of `rows`.
A device block that is swapped out may be written again by the same plan, so that order is part of the contract.
Host slots may go out and come back in one plan, too. No block is the source of a copy and the target of another move.

A plan is good until it is committed: the scheduler keeps the rows of decoding sequences and moves them on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence as Listed

    from engine.sequence import Sequence


class BlockMove(NamedTuple):
    """Copy of one whole block: `source` and `target` are device block ids, or host slots, by the list that holds it."""

    source: int
    target: int


@dataclass(slots=True)
class Row:
    """One sequence's share of a step.

    position   0 ........... start ............ start + len(token_ids)
               | KV is in the pool | computed and written by this step |
    token_ids      newest, or a chunk's tokens; then the proposals, whose KV counts only as far as they are accepted
    block_table[i] holds positions [i * block_size, (i + 1) * block_size) and covers all of the above
    """

    sequence: Sequence
    start: int
    token_ids: list[int]
    block_table: list[int]
    num_logits: (
        int  # the last n positions whose logits are wanted: 0 inside a prompt, 1 to sample, more for prompt_logprobs
    )
    draws: list[Sequence] = field(
        default_factory=list
    )  # sequences that each draw a token from the last logits (n after a prompt)
    num_proposals: int = 0  # of a decoding row; the sequence then draws at each of the last 1 + n positions
    draft_start: int = 0  # where proposals are a model's to make: so many tokens has it computed
    follows: int | None = None  # the draw of the step before whose token this row computes; None: the token is known

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """How many output tokens its sequence will have got before this row's draw, beside those that it has."""
        return 0 if self.follows is None else 1

    @property
    def num_samples(self) -> int:
        return self.num_proposals + len(self.draws)

    @property
    def proposals(self) -> list[int]:
        return self.token_ids[1:] if self.num_proposals else []

    def propose(self, token_ids: list[int]) -> None:
        """Makes a decoding row verify these behind its newest token."""
        self.token_ids = [self.token_ids[0], *token_ids]
        self.num_proposals = len(token_ids)
        self.num_logits = len(self.token_ids)

    def withdraw_proposals(self) -> None:
        if self.num_proposals:
            self.propose([])


@dataclass(slots=True)
class Plan:
    step_index: int
    rows: list[Row] = field(default_factory=list)  # plain decodes, decodes with proposals, prefill chunks
    num_decodes: int = 0  # so many leading rows compute one token and draw one, for their own sequence
    copies: list[BlockMove] = field(default_factory=list)  # device -> device, copy-on-write
    swap_out: list[BlockMove] = field(default_factory=list)  # device -> host
    swap_in: list[BlockMove] = field(default_factory=list)  # host -> device

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.copies or self.swap_out or self.swap_in)


class RowShape(Protocol):
    """What of a row a forward must know: a `Row`, or what another rank was told of one."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def block_table(self) -> list[int]: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def follows(self) -> int | None: ...


class StepShape(Protocol):
    """What of a plan a forward must know."""

    @property
    def rows(self) -> Listed[RowShape]: ...
    @property
    def copies(self) -> list[BlockMove]: ...
    @property
    def swap_out(self) -> list[BlockMove]: ...
    @property
    def swap_in(self) -> list[BlockMove]: ...


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float  # natural log, of the raw model distribution
    rank: int  # 1 = most likely


class PositionLogprobs(NamedTuple):
    """The chosen token at one position and the most likely ones there, most likely first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


class Candidate(NamedTuple):
    """A way for a beam to go on by one token."""

    token_id: int
    weight: float  # log-softmax of the model's logits, after the processors: what beams are ranked by; may be -inf
    logprob: float  # of the raw model distribution
    logprobs: PositionLogprobs | None = None  # where they were asked for


@dataclass(slots=True)
class Sampled:
    """One draw. `error` is set instead of a token when that draw alone failed (NaN logits, empty support).

    A beam draws no token: its likeliest `candidates` are named, the heaviest first, equal ones by id.
    """

    token_id: int | None
    logprobs: PositionLogprobs | None = None
    error: str | None = None
    candidates: list[Candidate] | None = None


@dataclass(slots=True)
class StepResult:
    """`samples` run parallel to the plan: for each row in order, one entry for each of its draws in order.

    A row with K proposals has 1 + K of them: entry j is the target's token if proposals before j were output. Where a
    model made the proposals, the runner has put them into the row.

    `prompt_logprobs[i]` holds row i's prompt positions, for rows that asked: entry j is about the token *after*
    position `row.end - row.num_logits + j`, as far as that token is part of the prompt.
    """

    samples: list[Sampled]
    prompt_logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    row_errors: dict[int, str] = field(default_factory=dict)  # rows whose forward failed, and why; their draws are void
    draft_seconds: float = 0.0  # of the step, for making proposals

    def by_row(self, plan: Plan) -> list[list[Sampled]]:
        """The samples of each row. Ask before the plan is committed, which moves its rows on."""
        ends = list(accumulate((row.num_samples for row in plan.rows), initial=0))
        return [self.samples[start:end] for start, end in pairwise(ends)]


class Runner(Protocol):
    """Executes plans: a model on a device, or the deterministic fake. It keeps KV, never decides."""

    vocab_size: int
    max_model_len: int
    num_kv_blocks: int
    num_host_slots: int
    block_size: int

    def execute(self, plan: Plan) -> StepResult: ...
