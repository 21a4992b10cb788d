"""When a sequence's newest token ends it. Stop strings are the detokenizer's to find. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.outputs import FinishReason
    from engine.sequence import Request, Sequence


def finish_of(sequence: Sequence) -> tuple[FinishReason, int | None] | None:
    """(finish_reason, stop_reason) if the sequence ends here, else None.

    An end-of-sequence token has no stop_reason, a stop token is its own. Neither counts before `min_tokens`.
    """
    output = sequence.output_token_ids
    return end_of(sequence.request, output[-1], len(output)) if output else None


def end_of(request: Request, token_id: int, num_outputs: int) -> tuple[FinishReason, int | None] | None:
    """The same for the token that makes an output `num_outputs` long."""
    if num_outputs >= request.params.min_tokens:
        if token_id in request.eos_token_ids:
            return "stop", None
        if token_id in request.stop_token_ids:
            return "stop", token_id
    if request.params.max_tokens is not None and num_outputs >= request.params.max_tokens:
        return "length", None
    return None
