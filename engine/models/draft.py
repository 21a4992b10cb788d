"""Loads what drafts for a target: a smaller model, or the target's own int8 copy."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.config import MODEL_PROPOSERS
from engine.drafter import Drafter
from engine.errors import InvalidConfig
from engine.kv_storage import KVStorage
from engine.models.load import load_decoder
from engine.models.native import NativeDecoder
from engine.text.tokenizer import Tokenizer
from engine.weights import resolve

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.models.load import AnyDecoder


@dataclass(frozen=True)
class DraftModel:
    """What `config.speculative` names, loaded."""

    decoder: AnyDecoder
    max_len: int | None  # tokens of context, where they may be fewer than the target's
    has_own_kv: bool

    def drafter(self, kv: KVStorage, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> Drafter:
        """For a target with this KV. It may make drafters for many."""
        if self.has_own_kv:
            kv = KVStorage(self.decoder.config, config.block_size, kv.num_blocks, 0, torch.float32, self.decoder.device)
        return Drafter(
            self.decoder,
            kv,
            config.block_size,
            has_own_kv=self.has_own_kv,
            keeps_logits=config.speculative_verification == "rejection",
            clock=clock,
        )


def load_draft_model(folder: Path, target: AnyDecoder, config: EngineConfig) -> DraftModel | None:
    """None where no model drafts. `folder`: the target's.

    Raises InvalidConfig for one that cannot draft for this target.
    """
    if config.speculative not in MODEL_PROPOSERS:
        return None
    if target.device.type != "cpu":
        raise InvalidConfig("speculative", f"{config.speculative} is not built for a GPU yet; use ngram or suffix")
    if config.speculative == "self":
        return DraftModel(_int8_copy(folder, target, config), None, has_own_kv=False)
    assert config.speculative_model is not None
    draft_folder = resolve(config.speculative_model)
    fields = json.loads((draft_folder / "config.json").read_text())
    own = replace(
        config, max_model_len=None, kv_cache_dtype="auto", dtype="auto" if config.dtype == "int8" else config.dtype
    )
    decoder, max_len = load_decoder(draft_folder, fields, torch.float32, target.device, own)
    _check_vocabulary(decoder.config.vocab_size, target.config.vocab_size, draft_folder, folder)
    return DraftModel(decoder, max_len, has_own_kv=True)


def _int8_copy(folder: Path, target: AnyDecoder, config: EngineConfig) -> AnyDecoder:
    if not isinstance(target, NativeDecoder):
        raise InvalidConfig("speculative", "is self, whose int8 copy the native CPU path alone has; use ngram")
    if config.dtype == "int8":
        raise InvalidConfig("speculative", "is self, and the target is int8 already; use ngram, or dtype float32")
    fields = json.loads((folder / "config.json").read_text())
    return load_decoder(folder, fields, torch.float32, target.device, replace(config, dtype="int8"))[0]


def _check_vocabulary(draft_size: int, target_size: int, draft_folder: Path, folder: Path) -> None:
    """A token id must mean the same to both."""
    if draft_size != target_size:
        raise InvalidConfig(
            "speculative_model",
            f"has a vocabulary of {draft_size} tokens, the model one of {target_size}; name another",
        )
    ours, theirs = Tokenizer(folder), Tokenizer(draft_folder)
    for token_id in range(target_size):
        if ours.token_bytes(token_id) != theirs.token_bytes(token_id):
            raise InvalidConfig(
                "speculative_model",
                f"means {theirs.token_bytes(token_id)!r} by token {token_id}, the model "
                f"{ours.token_bytes(token_id)!r}; name a model with the same vocabulary",
            )
