"""How much fits: chunk length and fan-in, so that instruction, text and summary always fit the context. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from infra.contracts import JobError
from infra.runs import SummaryParams
from worker.runs.prompts import item_tokens

DEFAULT_CHUNK_TOKENS = 1024
MARGIN_TOKENS = 16  # a text inside a prompt may be cut into a few more tokens than alone
MIN_CHUNK_TOKENS = 16
JOIN_TOKENS = 8  # between two summaries in a reduce's prompt, and what a summary may gain by being read again


@dataclass(frozen=True, slots=True)
class Budget:
    chunk_tokens: int
    overlap_tokens: int
    fan_in: int


def budget_of(params: SummaryParams, *, context_tokens: int, instruction_tokens: int) -> Budget | JobError:
    """What a run can use of a model. `instruction_tokens`: of the longest prompt without its text.

    What was asked for is lowered to what fits; a JobError where nothing would.
    """
    part_tokens = item_tokens(params, is_final=False)
    room = context_tokens - instruction_tokens - part_tokens - MARGIN_TOKENS
    fan_in = min(params.fan_in, room // (part_tokens + JOIN_TOKENS))
    if room < MIN_CHUNK_TOKENS or fan_in < 2:
        return JobError(
            code="context_length_exceeded",
            message=f"the model's context of {context_tokens} tokens holds no instruction ({instruction_tokens}), two "
            f"summaries to join and a summary of {part_tokens}; ask for a lower target_tokens or a larger model",
            param="target_tokens",
        )
    chunk_tokens = min(params.chunk_tokens or DEFAULT_CHUNK_TOKENS, room)
    return Budget(chunk_tokens, min(params.overlap_tokens, chunk_tokens // 2), fan_in)
