"""Token = argmax of logit + T * g over the tokens that may be drawn, ties to the lower id; g as in noise.py.

Before that, in this order: the token's bias; the repetition penalty, where the token was seen: a positive logit is
divided by it, a negative one multiplied; minus frequency * count, and minus presence if the count is not 0.
"""

from __future__ import annotations

import torch

from kernels.sampling.draws import Drawn, Draws, Outcome, Support, TokenEdits
from kernels.sampling.noise import gumbel_noise


def sample(
    logits: torch.Tensor,
    draws: Draws,
    edits: TokenEdits | None = None,
    support: Support | None = None,
    mask: torch.Tensor | None = None,
) -> Drawn:
    """logits: [rows, vocab], fp32, left as they are; mask: [draws, ceil(vocab / 32)], int32, bit (id % 32) of word
    (id // 32) set where the token may be drawn (a grammar's).
    """
    token_ids, outcomes = [], []
    for draw in range(len(draws)):
        row = logits[draws.places[draw]].clone()
        if edits is not None:
            _edit(row, draws, edits, draw)
        is_bad = bool((row.isnan() | (row == torch.inf)).any())
        ids = torch.arange(len(row), device=row.device)
        if support is not None:
            floor = support.floors[draw]
            row[~((row > floor) | ((row == floor) & (ids <= support.last_ids[draw])))] = -torch.inf
        if mask is not None:
            row[(mask[draw, ids // 32] >> (ids % 32)) & 1 == 0] = -torch.inf
        temperature = float(draws.temperatures[draw])
        if temperature > 0:
            key = (int(draws.seeds[draw]), int(draws.choices[draw]), int(draws.output_indices[draw]))
            row += temperature * gumbel_noise(*key, len(row), row.device)
        is_empty = bool((row == -torch.inf).all())
        outcomes.append(Outcome.NOT_FINITE if is_bad else Outcome.EMPTY if is_empty else Outcome.TOKEN)
        token_ids.append(int(row.argmax()) if outcomes[-1] == Outcome.TOKEN else 0)
    return Drawn(
        torch.tensor(token_ids, dtype=torch.int64, device=logits.device),
        torch.tensor(outcomes, dtype=torch.int32, device=logits.device),
    )


def edit(logits: torch.Tensor, draws: Draws, edits: TokenEdits) -> torch.Tensor:
    """[draws, vocab]: each draw's own copy of its row, edited."""
    edited = logits[draws.places]
    for draw in range(len(draws)):
        _edit(edited[draw], draws, edits, draw)
    return edited


def _edit(row: torch.Tensor, draws: Draws, edits: TokenEdits, draw: int) -> None:
    mine = slice(int(edits.starts[draw]), int(edits.starts[draw + 1]))
    ids, counts = edits.token_ids[mine], edits.output_counts[mine]
    values = row[ids] + edits.biases[mine]
    factor = draws.repetition_penalties[draw]
    values = torch.where(edits.is_seen[mine], torch.where(values > 0, values / factor, values * factor), values)
    penalty = draws.frequency_penalties[draw] * counts + draws.presence_penalties[draw]
    row[ids] = torch.where(counts > 0, values - penalty, values)
