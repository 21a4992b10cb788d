"""Architectures without a decoder of our own: transformers' model, with our paged attention and our KV pool.

`transformers_attention` is what its layers call, `transformers_checks` refuses what that would change. transformers is
imported when such a model is loaded, and by nothing else. Weights are safetensors; no code from the folder is run.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.batch import Batch
from engine.errors import ModelLoadError
from engine.kv_storage import KVStorage
from engine.models.transformers_attention import NAME, STEP, PagedStep, paged
from engine.models.transformers_checks import check_config, try_out


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """What the engine must know of such a model."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int


class TransformersDecoder:
    """One of transformers' decoders behind the interface of `decoder.Decoder`."""

    best_ids = None

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelLoadError, with the model's type and the reason, for a model that cannot be served."""
        try:
            import transformers
        except ImportError as error:
            raise ModelLoadError(
                f"{folder} has no native decoder and transformers is not installed; pip install transformers"
            ) from error
        self.device, self.index_dtype = device, torch.int64
        self.kernels = f"transformers-{transformers.__version__}-1"  # changes whenever the arithmetic does
        config = _read_config(folder)
        try:
            check_config(config)
            self._model = _load(folder, config, dtype).to(device)
            self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
            call = try_out(config, device, dtype, self._alone, self._logits)
        except ModelLoadError as error:
            raise ModelLoadError(f"model_type {config.model_type!r} cannot be served: {error}") from error
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"model_type {config.model_type!r}: its forward pass fails: {error}") from error
        self.config = ForeignConfig(
            vocab_size=config.get_text_config().vocab_size,
            num_layers=config.get_text_config().num_hidden_layers,
            num_kv_heads=call.num_kv_heads,
            head_dim=call.head_dim,
            max_position=config.get_text_config().max_position_embeddings,
        )
        self.choices = {
            "forward": f"forward: transformers {transformers.__version__}, {type(self._model).__name__} with paged "
            f"attention: {config.model_type} has no native decoder"
        }

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """Logits [len(batch.logit_places), vocab], fp32; writes the batch's keys and values into `kv`."""
        return self._logits(batch, PagedStep(batch.rows, batch.slots, lambda layer, key, value: kv.layer(layer)))

    def _logits(self, batch: Batch, step: PagedStep) -> torch.Tensor:
        kept = {"logits_to_keep": batch.logit_places} if self._keeps_logits else {}
        arguments = {"input_ids": batch.token_ids[None], "position_ids": batch.positions[None], "use_cache": False}
        logits: torch.Tensor = self._model(**arguments, **kept, **{STEP: step}).logits[0]
        return (logits if self._keeps_logits else logits[batch.logit_places]).float()

    def _alone(self, token_ids: torch.Tensor) -> torch.Tensor:
        self._model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self._model(input_ids=token_ids[None], use_cache=False).logits[0, -1]
        finally:
            self._model.set_attn_implementation(NAME)
        return logits.float()


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{folder}/config.json is of no model that transformers knows: {error}") from error


def _load(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(NAME, paged)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, OSError, RuntimeError, ImportError, KeyError) as error:
        raise ModelLoadError(f"transformers cannot load it: {error}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:  # which transformers would fill with random numbers
        raise ModelLoadError(f"{folder} lacks {len(missing)} of its tensors, {missing[0]} among them")
    model.eval()
    return model
