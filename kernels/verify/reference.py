"""A proposal is accepted iff it is the token that the target draws itself, given that all before it are accepted:

    num_accepted = the first j where proposal[j] != target[j] or target[j] is no token; else the number of proposals

The sequence then goes on with target[0 .. num_accepted], the last of which is the target's own.
"""

from __future__ import annotations

import torch


def count_accepted(
    targets: torch.Tensor, is_token: torch.Tensor, proposals: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Sequence i has proposals starts[i] .. starts[i + 1] and one target more: its targets begin at starts[i] + i.

    targets: [proposals + sequences], int64; is_token: alike, bool, False where the draw failed; proposals: int64;
    starts: [sequences + 1], int64. Returns [sequences], int64.
    """
    counts = []
    for sequence, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        drawn = slice(start + sequence, end + sequence)
        is_accepted = (proposals[start:end] == targets[drawn]) & is_token[drawn]
        counts.append(int(is_accepted.long().cumprod(0).sum()))
    return torch.tensor(counts, dtype=torch.int64, device=targets.device)
