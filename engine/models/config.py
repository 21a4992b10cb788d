"""What the decoder needs to know about a model, whatever family it is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol


class ModelShape(Protocol):
    """What runner and KV storage must know of any model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position(self) -> int: ...  # the context that the model was made for


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies of one kind of layer."""

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    theta: float
    rotary_dim: int  # of a head's dimensions, how many turn
    parameters: dict[str, Any]  # of the kind, with Hugging Face's names


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Where layers of one model differ."""

    window: int | None  # how many positions back a query sees, itself included; None: all
    rope: int  # index into DecoderConfig.ropes


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer with pre-norm layers, rotary attention and a gated feed-forward part."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # the context that the model was made for
    norm_eps: float
    activation: Literal["silu", "gelu_tanh"]
    ropes: tuple[RopeConfig, ...]
    layers: tuple[LayerConfig, ...]
    is_tied: bool  # the output matrix is the embedding
    attention_scale: float
    norm_offset: float = 0.0  # Gemma stores its norm weights minus one
    embedding_scale: float = 1.0
    has_post_norms: bool = False  # Gemma norms each part's output too, before it is added
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def windows(self) -> set[int | None]:
        return {layer.window for layer in self.layers}
