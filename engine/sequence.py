"""A request, and the sequences (its choices) that grow from its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.beams import BeamSearch
    from engine.guided.matcher import GrammarMatcher
    from engine.host_store import HostKey
    from engine.outputs import FinishReason
    from engine.params import SamplingParams
    from engine.plan import PositionLogprobs

SEED_MASK = 2**64 - 1


class SequenceState(Enum):
    WAITING = "waiting"  # never ran, or shares the prompt that a sibling computes
    RUNNING = "running"  # has a seat, and blocks for what is computed
    PREEMPTED = "preempted"  # lost its blocks; its tokens are computed again
    SWAPPED = "swapped"  # its blocks are in the host store
    FINISHED = "finished"


_TRANSITIONS: dict[SequenceState, frozenset[SequenceState]] = {
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.RUNNING: frozenset({SequenceState.PREEMPTED, SequenceState.SWAPPED, SequenceState.FINISHED}),
    SequenceState.PREEMPTED: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    SequenceState.SWAPPED: frozenset({SequenceState.RUNNING, SequenceState.PREEMPTED, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One stream of tokens.

        0 ............. num_prompt_tokens ............. num_tokens
        | prompt_token_ids | output_token_ids           |
        | KV in the pool, num_computed_tokens | to be computed |

    While it decodes, exactly its newest token is not computed yet.
    """

    request: Request
    choice: int
    seed: int  # 64 bits: the noise of a draw is keyed by (seed, choice, len(output_token_ids), token id)
    output_token_ids: list[int] = field(default_factory=list)
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, from the first on
    num_registered_blocks: int = 0  # how many of its blocks the prefix cache has been told of
    host_keys: list[HostKey] = field(default_factory=list)  # while swapped: one for each block
    num_draft_tokens: int = 0  # so many tokens of its blocks the drafting model has computed, too
    matcher: GrammarMatcher | None = None  # of a guided output; asked by one at a time: who proposes, then who draws
    check_at: int = 0  # while it decodes: so many computed tokens fill its last block or end it by length
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.request.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens wanted beside each drawn one; None where not even its own logprob is."""
        count = self.request.params.logprobs
        return 0 if count is None and self.request.is_ranked else count

    @property
    def order(self) -> tuple[float, int, int]:
        """Its place among all sequences; lower goes first. Never changes."""
        return (self.request.key, self.request.arrival_index, self.choice)

    @property
    def num_forks(self) -> int:
        """How many sequences go on from here once the prompt is computed: itself, and siblings that wait for it."""
        return 1 if self.request.is_forked else self.request.num_unfinished

    @property
    def target(self) -> int:
        """So many tokens are computed before it draws: all, or what it shares with siblings that wait to fork."""
        return self.num_tokens if self.num_forks == 1 else self.request.num_shared_tokens

    @property
    def draws(self) -> list[Sequence]:
        """The sequences that draw their next token from the logits of its target."""
        if self.num_forks == 1:
            return [self]
        if self.request.beams is not None:
            return [] if self.output_token_ids else [self]
        return [each for each in self.request.sequences if not (each.is_finished or each.output_token_ids)]

    @property
    def group(self) -> list[Sequence]:
        """The sequences that lose and get their blocks with it: itself, or all beams of its request once they fork."""
        if self.request.beams is None or self.state not in (SequenceState.RUNNING, SequenceState.SWAPPED):
            return [self]
        return [each for each in self.request.sequences if each.state is self.state]

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start..end (half-open)."""
        prompt = self.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        if start >= len(prompt):
            return self.output_token_ids[start - len(prompt) : end - len(prompt)]
        return prompt[start:] + self.output_token_ids[: end - len(prompt)]

    def ahead(self, token_ids: list[int]) -> Sequence:
        """A stand-in whose output goes on with `token_ids`: what a draw sees if these are accepted. Holds no blocks."""
        output = self.output_token_ids + token_ids
        return Sequence(self.request, self.choice, self.seed, output, matcher=self.matcher)

    def move_to(self, state: SequenceState) -> None:
        """Changes the state; a change that the table does not allow is a bug and raises RuntimeError."""
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"sequence {self.request.request_id}/{self.choice}: {self.state} -> {state}")
        self.state = state


@dataclass(slots=True, eq=False)
class Request:
    """What was added to the engine: one prompt, and `params.num_sequences` sequences that share it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams  # validated, with max_tokens filled in
    seed: int  # params.seed, or the one drawn for it; 64 bits
    salt: str = ""  # prefix-cache domain
    adapter: str = ""
    tenant: str = ""
    arrival: float = 0.0  # seconds of the engine's clock
    deadline: float | None = None  # seconds of the engine's clock
    bad_word_token_ids: list[list[int]] = field(default_factory=list)
    eos_token_ids: frozenset[int] = frozenset()  # what ends a sequence; empty where params.ignore_eos
    stop_token_ids: frozenset[int] = frozenset()  # params.stop_token_ids and eos_token_ids together
    sequences: list[Sequence] = field(default_factory=list)  # in choice order
    beams: BeamSearch | None = None  # where params.use_beam_search: its sequences are beams, best first

    key: float = 0.0  # from the policy, at arrival
    arrival_index: int = 0  # counts arrivals; breaks ties of key
    is_forked: bool = False  # what they share is computed, and its sequences go their own ways
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache spared, at the first start
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # as far as computed; entry i is about prompt token i
    first_scheduled: float | None = None  # seconds of the engine's clock
    num_preemptions: int = 0
    num_swaps: int = 0
    num_drafted_tokens: int = 0  # proposals that were verified for its sequences
    num_accepted_tokens: int = 0  # of them accepted

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_ranked(self) -> bool:
        """Whether its choices are the likeliest of more sequences that are drawn."""
        return self.beams is None and self.params.num_sequences > self.params.n

    @property
    def num_shared_tokens(self) -> int:
        """So many first tokens are computed by the trunk for all, before they fork."""
        return self.num_prompt_tokens + (0 if self.beams is None else self.beams.num_common_tokens)

    @property
    def trunk(self) -> Sequence | None:
        """The sequence that computes what all share, until they fork; None once they have.

        Beams that lost their blocks, or are swapped, are one again: the first waits for all.
        """
        if self.is_forked:
            return None
        return next((sequence for sequence in self.sequences if not sequence.is_finished), None)

    @property
    def num_unfinished(self) -> int:
        return sum(1 for sequence in self.sequences if not sequence.is_finished)

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)
