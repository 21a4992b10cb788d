"""Tokens that a step takes over from the draws of the step before, on the device: the host has not seen them yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.plan import RowShape


def put_tokens(rows: Sequence[RowShape], last: torch.Tensor | None, token_ids: torch.Tensor) -> None:
    """Writes into token_ids [tokens], int64, for each row that follows a draw, that draw's token of `last` [draws].

    Rows that follow have one token each. Raises ValueError where there are no last draws.
    """
    following = [(place, row.follows) for place, row in _with_places(rows) if row.follows is not None]
    if not following:
        return
    if last is None:
        raise ValueError("a row follows a draw, and the last step had none")
    places, draws = zip(*following, strict=True)
    if places == draws == tuple(range(len(last))):  # the same sequences one token on, as most often
        token_ids[: len(last)].copy_(last)
        return
    index = torch.tensor([places, draws], device="cpu")
    index = index.to(token_ids.device, non_blocking=True)
    token_ids[index[0]] = last[index[1]]


def _with_places(rows: Sequence[RowShape]) -> list[tuple[int, RowShape]]:
    """Each row with the place of its first token among the tokens of all."""
    found, place = [], 0
    for row in rows:
        found.append((place, row))
        place += len(row.token_ids)
    return found
