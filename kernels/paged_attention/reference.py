"""For each query q at position p, over the keys k and values v at positions max(0, p - window + 1) .. p:

    score = scale * (q . k);   with softcap c: score = c * tanh(score / c);   y = sum softmax(score) * v

Each group of heads / kv_heads query heads shares one key head.
"""

from __future__ import annotations

import torch

from kernels.paged_attention.rows import PagedRows


def paged_attention(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    rows: PagedRows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """query: [tokens, heads, head_dim]; pools: [blocks, block_size, kv_heads, head_dim]. Returns query's shape."""
    output = torch.empty_like(query)
    group_size = query.shape[1] // key_pool.shape[2]
    for row in range(len(rows)):
        start, end = rows.query_starts[row], rows.query_starts[row + 1]
        context_len = rows.context_lens[row]
        blocks = torch.tensor(rows.block_tables[row], dtype=torch.long, device=query.device)
        keys = key_pool[blocks].flatten(0, 1)[:context_len].float()  # [context, kv_heads, head_dim]
        values = value_pool[blocks].flatten(0, 1)[:context_len].float()
        keys, values = (x.repeat_interleave(group_size, dim=1) for x in (keys, values))
        score = torch.einsum("qhd,khd->hqk", query[start:end].float(), keys) * scale
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        position = torch.arange(context_len, device=query.device)
        distance = position[context_len - (end - start) :, None] - position[None, :]  # of key behind query
        hidden = (distance < 0) | (distance >= (window or context_len))
        weight = score.masked_fill(hidden, -torch.inf).softmax(-1)
        output[start:end] = torch.einsum("hqk,khd->qhd", weight, values).to(query.dtype)
    return output
