"""Searches along the vocabulary, for many rows at once; a row's answer does not depend on the rows beside it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_BLOCK = 16  # tokens of a block: j, j + B, j + 2B, ... of B = vocab / 16 blocks


def largest(logits: torch.Tensor) -> tuple[list[float], list[int]]:
    """(values, ids) of the rows of logits [n, vocab]; among equals the lowest id, NaN before all."""
    if logits.device.type == "cpu":  # numpy's search is vectorized, torch's is not: 20 times as fast
        host = logits.numpy()
        ids = [int(row.argmax()) for row in host]
        return [float(row[token_id]) for row, token_id in zip(host, ids, strict=True)], ids
    best = logits.argmax(-1)
    return logits.gather(1, best[:, None]).squeeze(1).tolist(), best.tolist()


def values_at(logits: torch.Tensor, ids: npt.NDArray[np.int32]) -> tuple[list[float], list[int]]:
    """(values, ids) of logits [n, vocab] on the CPU, one for each row."""
    return logits.numpy()[np.arange(len(ids)), ids].tolist(), ids.tolist()


def top(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Ids [n, count] of each row's largest logits, largest first, equal ones by id.

    The `count` largest lie in the `count` blocks with the largest maxima, unless more blocks reach the least of these.
    """
    num_rows, vocab = logits.shape
    num_blocks = vocab // _BLOCK
    if count == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    if num_blocks <= count:
        return _rank(logits, count)
    maxima = logits[:, : num_blocks * _BLOCK].view(num_rows, _BLOCK, num_blocks).amax(1)
    bounds, blocks = maxima.topk(count, dim=-1)
    steps = torch.arange(_BLOCK, device=logits.device) * num_blocks
    rest = torch.arange(num_blocks * _BLOCK, vocab, device=logits.device).expand(num_rows, -1)
    ids = torch.cat(((blocks[:, :, None] + steps).flatten(1), rest), dim=1).sort(dim=-1).values
    found = ids.gather(1, _rank(logits.gather(1, ids), count))
    is_open = (maxima >= bounds[:, -1:]).sum(-1) > count
    for row in is_open.nonzero().squeeze(-1).tolist():
        found[row] = _rank(logits[row : row + 1], count)[0]
    return found


def _rank(values: torch.Tensor, count: int) -> torch.Tensor:
    """Places [n, count] of the largest values, largest first, equal ones by place."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def ranks(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[n]: the places of `ids` [n, 1] in the order of their rows, from 1."""
    values = logits.gather(1, ids)
    found = 1 + _counts(logits > values)
    is_among_equals = _counts(logits >= values) > found
    for row in is_among_equals.nonzero().squeeze(-1).tolist():
        found[row] += (logits[row, : int(ids[row])] == values[row]).sum()
    return found


def _counts(is_counted: torch.Tensor) -> torch.Tensor:
    """[n]: how many are true in each row; torch adds small integers faster than booleans."""
    return is_counted.view(torch.int8).sum(-1, dtype=torch.int32)
