"""What steps cost, measured while they run: for cutting prefill chunks and for choosing how to preempt. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.speculation.decode_curve import DecodeCurve

_WEIGHT = 0.2  # of the newest measurement in a moving average
_LEAST_PREFILL_SHARE = 0.1  # of a mixed step's time, whatever decoding alone was measured to take


class StepSize(NamedTuple):
    """What one step did."""

    num_prefill_tokens: int
    num_decoding: int = 0  # sequences
    num_proposals: int = 0  # of theirs, verified
    num_drawn: int = 0  # tokens that came of them
    draft_depth: int = 0  # proposals of the sequence with the most of them, where a model made them

    @property
    def num_tokens(self) -> int:
        """Computed."""
        return self.num_prefill_tokens + self.num_decoding + self.num_proposals


@dataclass(slots=True)
class StepCosts:
    """Rates; None until measured. `observe` after each step keeps them current."""

    seconds_per_prefill_token: float | None = None
    seconds_per_decode_step: float | None = None
    seconds_per_decode_token: float | None = None
    seconds_per_block_copy: float | None = None  # one way, between device and host
    seconds_per_draft: float | None = None  # for one more proposal of each sequence that has one, where a model drafts
    decode_curve: DecodeCurve = field(default_factory=DecodeCurve)

    def observe(self, size: StepSize, seconds: float, draft_seconds: float = 0.0) -> None:
        """`seconds`: of the whole step; of these `draft_seconds` for making proposals."""
        if size.draft_depth:
            self.seconds_per_draft = _moved(self.seconds_per_draft, draft_seconds / size.draft_depth)
        if size.num_prefill_tokens == 0:
            if size.num_decoding:
                self.seconds_per_decode_step = _moved(self.seconds_per_decode_step, seconds)
                self.seconds_per_decode_token = _moved(self.seconds_per_decode_token, seconds / size.num_drawn)
                num_tokens = size.num_decoding + size.num_proposals
                self.decode_curve.observe(size.num_decoding, num_tokens, seconds - draft_seconds)
            return
        decoding = (self.seconds_per_decode_step or 0.0) if size.num_decoding else 0.0
        prefilling = max(seconds - decoding, seconds * _LEAST_PREFILL_SHARE)
        self.seconds_per_prefill_token = _moved(self.seconds_per_prefill_token, prefilling / size.num_prefill_tokens)

    def num_prefill_tokens_within(self, seconds: float) -> int | None:
        """Prefill tokens that fit a step of so many seconds beside the decodes; None while nothing is measured."""
        if not self.seconds_per_prefill_token:
            return None
        return max(0, int((seconds - (self.seconds_per_decode_step or 0.0)) / self.seconds_per_prefill_token))

    def prefers_swap(self, *, num_tokens: int, num_blocks: int) -> bool:
        """Whether moving the blocks out and back takes less time than computing the tokens again.

        While either rate is unknown the answer is yes: copying a block is cheap beside a forward over its tokens.
        """
        if self.seconds_per_block_copy is None or self.seconds_per_prefill_token is None:
            return True
        return 2 * num_blocks * self.seconds_per_block_copy < num_tokens * self.seconds_per_prefill_token


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
