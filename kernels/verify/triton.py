"""num_accepted = the first j where proposal[j] != target[j] or target[j] is no token; else the number of proposals."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 32  # proposals compared at once


def count_accepted(
    targets: torch.Tensor, is_token: torch.Tensor, proposals: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Sequence i has proposals starts[i] .. starts[i + 1] and one target more: its targets begin at starts[i] + i.

    targets: [proposals + sequences], int64; is_token: alike, bool, False where the draw failed; proposals: int64;
    starts: [sequences + 1], int64. Returns [sequences], int64.
    """
    num_accepted = torch.empty(len(starts) - 1, dtype=torch.int64, device=targets.device)
    if len(num_accepted):
        _count_accepted[(len(num_accepted),)](
            targets, is_token, proposals, starts, num_accepted, CHUNK=_CHUNK, num_warps=1
        )
    return num_accepted


@triton.jit
def _count_accepted(targets_ptr, is_token_ptr, proposals_ptr, starts_ptr, num_accepted_ptr, CHUNK: tl.constexpr):
    """The first mismatch of one sequence, or its number of proposals."""
    sequence = tl.program_id(0)
    start = tl.load(starts_ptr + sequence)
    num_proposals = tl.load(starts_ptr + sequence + 1) - start
    accepted = num_proposals
    for chunk in range(0, num_proposals, CHUNK):
        place = chunk + tl.arange(0, CHUNK)
        inside = place < num_proposals
        drawn = start + sequence + place
        target = tl.load(targets_ptr + drawn, mask=inside, other=0)
        is_token = tl.load(is_token_ptr + drawn, mask=inside, other=0)
        proposal = tl.load(proposals_ptr + start + place, mask=inside, other=0)
        is_wrong = (target != proposal) | (is_token == 0)  # places beyond the last are no smaller than the number
        accepted = tl.minimum(accepted, tl.min(tl.where(is_wrong, place, num_proposals)))
    tl.store(num_accepted_ptr + sequence, accepted)
