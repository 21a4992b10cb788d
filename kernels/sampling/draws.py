"""What a batch of draws needs beside the logits, and what it answers: plain tensors, one entry per draw."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


@dataclass(frozen=True, slots=True)
class Draws:
    """D draws. All tensors are [D] and on the logits' device."""

    places: torch.Tensor  # int64, the row of the logits; several draws may share one
    temperatures: torch.Tensor  # fp32, 0 for greedy
    seeds: torch.Tensor  # int64, the bits of an unsigned seed
    choices: torch.Tensor  # int32
    output_indices: torch.Tensor  # int32
    repetition_penalties: torch.Tensor  # fp32, 1 for none
    frequency_penalties: torch.Tensor  # fp32
    presence_penalties: torch.Tensor  # fp32

    def __len__(self) -> int:
        return len(self.places)


@dataclass(frozen=True, slots=True)
class TokenEdits:
    """Draw d changes the logits of token_ids[starts[d]] .. token_ids[starts[d + 1]], no token twice."""

    starts: torch.Tensor  # [D + 1], int64
    token_ids: torch.Tensor  # [edits], int64
    biases: torch.Tensor  # [edits], fp32; -inf forbids
    is_seen: torch.Tensor  # [edits], bool: in the prompt or the output
    output_counts: torch.Tensor  # [edits], int32: how often in the output


@dataclass(frozen=True, slots=True)
class Support:
    """What top_k, top_p and min_p leave: the head of the ranking by logit, equal ones by id. A token may be drawn iff

    logit > floor, or logit == floor and token id <= last_id
    """

    floors: torch.Tensor  # [D], fp32; -inf leaves all
    last_ids: torch.Tensor  # [D], int64


class Outcome(IntEnum):
    TOKEN = 0
    NOT_FINITE = 1  # NaN or +inf among the logits
    EMPTY = 2  # no token is left


@dataclass(frozen=True, slots=True)
class Drawn:
    token_ids: torch.Tensor  # [D], int64; 0 where the outcome is not TOKEN: a step that follows may read it
    outcomes: torch.Tensor  # [D], int32, of Outcome
