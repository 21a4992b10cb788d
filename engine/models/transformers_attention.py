"""Our paged attention behind transformers' attention interface: what its attention modules call instead of their own.

A step reaches the function as a keyword argument of the model's forward, which every architecture with
`_supports_attention_backend` hands down to its attention modules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.errors import ModelLoadError
from kernels.kv_write import dispatch as kv_write
from kernels.paged_attention import dispatch as paged_attention
from kernels.paged_attention.dispatch import Attend
from kernels.paged_attention.rows import PagedRows

NAME = "millstream_paged"
STEP = "millstream_step"  # the keyword argument

# (layer, key, value) -> the layer's pools, each [num_blocks, block_size, kv_heads, head_dim]
Pools = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asked of attention."""

    num_kv_heads: int
    head_dim: int
    window: int | None


class PagedStep:
    """The attention of one forward pass: each layer's keys and values go to its pools, then all of a row's are read."""

    def __init__(self, rows: PagedRows, slots: torch.Tensor, pools: Pools) -> None:
        self.calls: dict[int, LayerCall] = {}  # by layer
        self._rows, self._slots, self._pools = rows, slots, pools
        self._write = kv_write.choose(slots.device).run
        self._prepare = paged_attention.choose(slots.device).run
        self._prepared: dict[int | None, Attend] = {}  # by window

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """[tokens, heads, head_dim] each -> the same shape as `query`. Raises ModelLoadError for what has no place in
        the KV pool.
        """
        if layer in self.calls:
            raise ModelLoadError(f"layer {layer} attends twice in one forward: the KV pool has one place for it")
        if key.shape != value.shape:
            raise ModelLoadError(
                f"its heads' keys have {key.shape[2]} numbers, its values {value.shape[2]}: the KV pool has one shape"
            )
        self.calls[layer] = LayerCall(key.shape[1], key.shape[2], window)
        pools = self._pools(layer, key, value)
        self._write(key, value, *pools, self._slots)
        if window not in self._prepared:
            self._prepared[window] = self._prepare(self._rows, self._slots.device, window)
        return self._prepared[window](query, *pools, scale, softcap)


def paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """The interface's function: [1, heads, tokens, head_dim] each -> ([1, tokens, heads, head_dim], no weights).

    `rest`: STEP, and what means nothing here (dropout, which is off when serving; positions, used before).
    Raises ModelLoadError for what the paged path does not compute.
    """
    step: PagedStep | None = rest.get(STEP)
    if step is None:
        raise ModelLoadError(f"{type(module).__name__} does not hand its keyword arguments down to attention")
    if attention_mask is not None:
        raise ModelLoadError(f"{type(module).__name__} brings an attention mask of its own")
    if s_aux is not None:
        raise ModelLoadError(f"{type(module).__name__} uses attention sinks, which are not supported yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelLoadError(f"{type(module).__name__} does not know which layer it is of")
    return step.attend(layer, query, key, value, scale, sliding_window, softcap)[None], None
