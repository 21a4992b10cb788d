"""Which of transformers' models can be served with paged attention: by their configuration, and by a trial.

All rows of a step lie behind one another in a single batch item; positions tell them apart, and attention, the only
part of a decoder where tokens meet, is ours. Whether that holds for a model is not believed but tried at load: two
short rows, one of them in two chunks, must give the logits that the model computes by itself for each alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from engine.batch import Batch, build_batch
from engine.errors import ModelLoadError
from engine.models.transformers_attention import LayerCall, PagedStep
from engine.params import SamplingParams
from engine.plan import Row
from engine.sequence import Request, Sequence

_PROMPT_LENS = (13, 9)  # tokens; the first prompt in two chunks
_CHUNK = 8
_BLOCK = 8
_BLOCK_TABLES = ([3, 0], [2, 1])
_TOLERANCE = {torch.float32: 1e-4}  # of the logits' own size
_HALF_TOLERANCE = 0.05
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_UNSTEADY_ROPES = {"dynamic", "longrope"}  # there, frequencies change with the longest row of a batch

Forward = Callable[[Batch, PagedStep], torch.Tensor]  # logits of the batch's wanted places, through paged attention


@torch.inference_mode()
def try_out(
    config: Any, device: torch.device, dtype: torch.dtype, alone: Callable[[torch.Tensor], torch.Tensor], paged: Forward
) -> LayerCall:
    """What every layer asks of attention. `alone`: token ids [n] -> the last one's logits, by the model itself.

    Raises ModelLoadError with the reason for a model that paged attention would change.
    """
    generator = torch.Generator().manual_seed(0)
    vocab = config.get_text_config().vocab_size
    prompts = [torch.randint(vocab, (length,), generator=generator).tolist() for length in _PROMPT_LENS]
    found, calls = _paged_logits(prompts, device, paged)
    for prompt, ours in zip(prompts, found, strict=True):
        theirs = alone(torch.tensor(prompt, device=device))
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        if not difference <= _TOLERANCE.get(dtype, _HALF_TOLERANCE):
            raise ModelLoadError(
                f"with paged attention its logits are off by {difference:.1e} of their size: "
                "some of it lies outside transformers' attention interface"
            )
    return _common_call(calls, config)


def _paged_logits(
    prompts: list[list[int]], device: torch.device, paged: Forward
) -> tuple[list[torch.Tensor], dict[int, LayerCall]]:
    """The last logits of each prompt: the first one's beginning beside the whole second one, then its rest."""
    pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def pools_of(layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in pools:
            key_pool, value_pool = (part.new_zeros(4, _BLOCK, *part.shape[1:]) for part in (key, value))
            pools[layer] = key_pool, value_pool
        return pools[layer]

    first, second = (
        Sequence(Request("trial", prompt, SamplingParams(), 0), 0, 0, block_table=table)
        for prompt, table in zip(prompts, _BLOCK_TABLES, strict=True)
    )
    found: dict[Sequence, torch.Tensor] = {}
    calls: dict[int, LayerCall] = {}
    for shares in ([(first, 0, _CHUNK), (second, 0, len(prompts[1]))], [(first, _CHUNK, len(prompts[0]))]):
        rows = [Row(each, start, each.tokens(start, end), each.block_table, 1) for each, start, end in shares]
        batch = build_batch(rows, _BLOCK, device)
        step = PagedStep(batch.rows, batch.slots, pools_of)
        found |= dict(zip([each for each, _, _ in shares], paged(batch, step), strict=True))
        calls |= step.calls
    return [found[first], found[second]], calls


def check_config(config: Any) -> None:
    """What the configuration alone shows to be impossible."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    if config.is_encoder_decoder:
        raise ModelLoadError("it is an encoder with a decoder, not a decoder alone")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError("transformers has no causal language model of this type")
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not architecture._supports_attention_backend:
        raise ModelLoadError(f"transformers' {architecture.__name__} does not use the attention interface")
    if "position_ids" not in inspect.signature(architecture.forward).parameters:
        raise ModelLoadError(f"transformers' {architecture.__name__} takes no positions")
    if getattr(config, "quantization_config", None):
        raise ModelLoadError("pre-quantized checkpoints are not supported; use the original weights")
    if not getattr(text, "max_position_embeddings", None):
        raise ModelLoadError("its configuration does not say how long its context is")
    unknown = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ModelLoadError(f"layer types {', '.join(sorted(unknown))} are not supported")
    if getattr(text, "attention_chunk_size", None):
        raise ModelLoadError("attention in chunks is not supported")
    unsteady = _rope_types(getattr(text, "rope_parameters", None)) & _UNSTEADY_ROPES
    if unsteady:
        raise ModelLoadError(f"rope type {', '.join(unsteady)} changes with the other sequences of a batch")


def _rope_types(parameters: Any) -> set[str]:
    """Of a model's rope_parameters: one set of them, or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values() if isinstance(value, dict)]
    return {str(parameters.get("rope_type"))}.union(*nested)


def _common_call(calls: dict[int, LayerCall], config: Any) -> LayerCall:
    """What all layers ask for alike; the KV pool has one shape, and every layer must be in it."""
    text = config.get_text_config()
    if sorted(calls) != list(range(text.num_hidden_layers)):
        raise ModelLoadError(f"only {len(calls)} of its {text.num_hidden_layers} layers attend over keys and values")
    if len({(call.num_kv_heads, call.head_dim) for call in calls.values()}) > 1:
        raise ModelLoadError("its layers' keys differ in shape, and the KV pool has one shape for all")
    has_windows = "sliding_attention" in (getattr(text, "layer_types", None) or ()) or (
        getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    )
    if has_windows and all(call.window is None for call in calls.values()):
        raise ModelLoadError("it has a sliding window and does not tell attention of it")
    return calls[0]
