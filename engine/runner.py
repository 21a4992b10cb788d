"""Executes plans with a real model: moves blocks, runs the forward pass, draws tokens. Keeps KV, decides nothing.

TorchRunner does so on a CPU, step by step; on a GPU `engine.cuda` takes its place.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.batch import build_batch
from engine.beam_sampler import answer
from engine.config import EngineConfig, LoadedModel, ModelInfo
from engine.drafter import Drafter
from engine.errors import DeviceFailed, InvalidConfig
from engine.guided.look_ahead import LookAhead
from engine.kv_storage import KVStorage, block_bytes, num_blocks_within
from engine.models.draft import DraftModel, load_draft_model
from engine.models.load import AnyDecoder, load_decoder
from engine.models.native import NativeDecoder
from engine.plan import Plan, Runner, StepResult, StepShape
from engine.processors import is_only_guided
from engine.rejection_sampler import reject
from engine.row_places import draws_of, prompt_logprobs
from engine.text.tokenizer import Tokenizer
from engine.weights import resolve
from engine.weights.digest import tokenizer_digest, weights_digest

if TYPE_CHECKING:
    from engine.cuda.runner import CudaRunner
    from engine.parallel.group import RankGroup

log = logging.getLogger(__name__)

GIB = 1 << 30
_DEFAULT_CPU_POOL_BYTES = GIB
OWN_THREADS = torch.get_num_threads()  # as many as torch takes by itself
_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_QUANTIZED = ("int8", "int4")


class TorchRunner:
    """A decoder, its KV storage and the sampler behind the Runner protocol."""

    def __init__(
        self,
        decoder: AnyDecoder,
        max_model_len: int,
        block_size: int,
        num_kv_blocks: int,
        num_host_slots: int,
        dtype: torch.dtype,
    ) -> None:
        """dtype: of keys and values."""
        self.vocab_size = decoder.config.vocab_size
        self.max_model_len = max_model_len
        self.block_size, self.num_kv_blocks, self.num_host_slots = block_size, num_kv_blocks, num_host_slots
        self.decoder = decoder
        self._look_ahead = LookAhead()
        self._drafter: Drafter | None = None
        self._rejects = False
        self._kv = KVStorage(decoder.config, block_size, num_kv_blocks, num_host_slots, dtype, decoder.device)

    def execute(self, plan: Plan) -> StepResult:
        """Raises DeviceFailed where the device itself broke; anything else concerns this plan alone."""
        try:
            return self._execute(plan)
        except torch.AcceleratorError as error:  # sticky: every later call would fail as well
            raise DeviceFailed(f"{self.decoder.device}: {error}") from error

    def _execute(self, plan: Plan) -> StepResult:
        self._kv.apply(plan)
        if not plan.rows:
            return StepResult([])
        draft_seconds, draft_logits = self._drafter.draft(plan) if self._drafter is not None else (0.0, {})
        draws = draws_of(plan.rows)
        grammars = self._look_ahead.begin([each.sequence for each in draws if not is_only_guided(each.sequence)])
        try:
            logits = self._logits(plan)
        finally:
            if grammars is not None:
                grammars.result()
        samples = answer(logits, draws, self.decoder.best_ids)
        if self._rejects:
            samples = reject(logits, plan.rows, samples, draft_logits)
        return StepResult(samples, prompt_logprobs(plan.rows, logits), draft_seconds=draft_seconds)

    def speculate(self, drafter: Drafter | None, *, rejects: bool) -> None:
        """Before the first plan: who makes the proposals of rows that do not hold them, and how all are verified."""
        self._drafter, self._rejects = drafter, rejects

    def drawn(self, plan: Plan, logits: torch.Tensor | None) -> StepResult:
        """What comes of the plan's logits."""
        if logits is None:
            return StepResult([])
        return StepResult(answer(logits, draws_of(plan.rows)), prompt_logprobs(plan.rows, logits))

    def forward(self, plan: StepShape) -> torch.Tensor | None:
        """The plan's moves and its logits [wanted, vocab]; None where it has no rows."""
        self._kv.apply(plan)
        return self._logits(plan) if plan.rows else None

    def _logits(self, plan: StepShape) -> torch.Tensor:
        decoder = self.decoder
        return decoder.forward(build_batch(plan.rows, self.block_size, decoder.device, decoder.index_dtype), self._kv)


def load_runner(model: str, config: EngineConfig) -> LoadedModel:
    """Loads an alias, folder, .gguf file, s3:// or hub id (`engine.weights.resolve`).

    Raises ModelLoadError for a model that cannot be used, InvalidConfig for settings that do not fit it.
    """
    log.info("loading %s", model)
    folder = resolve(model)
    device = _device(config)
    if config.tensor_parallel_size > 1:
        from engine.parallel.load import load_parallel

        runner: Runner
        runner, own = load_parallel(folder, config, device)
    else:
        own = load_computation(folder, config, device)
        runner = own.runner
    decoder, dtype = own.decoder, own.dtype
    vocab_size = decoder.config.vocab_size
    kv_dtype = _kv_dtype(config, dtype)
    draft = load_draft_model(folder, decoder, config)
    if draft is not None and not isinstance(draft.decoder, NativeDecoder):
        torch.set_num_threads(config.num_threads or OWN_THREADS)
    speculate(runner, config, draft)
    tokenizer = Tokenizer(folder)
    log.info("loaded %s from %s: %s on %s", model, folder, dtype, device)
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        info=ModelInfo(
            name=model,
            max_model_len=own.max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=tuple(sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)),
            weights_digest=weights_digest(folder),
            tokenizer_digest=tokenizer_digest(folder),
            dtype=config.dtype if config.dtype in _QUANTIZED else str(dtype).removeprefix("torch."),
            kv_dtype=str(kv_dtype).removeprefix("torch."),
            device=str(device),
            kernels=decoder.kernels,
            tensor_parallel_size=config.tensor_parallel_size,
            is_invariant=isinstance(decoder, NativeDecoder),
            chat_template=tokenizer.chat_template_source,
            max_draft_len=None if draft is None else draft.max_len,
        ),
    )


def speculate(runner: Runner, config: EngineConfig, draft: DraftModel | None) -> None:
    """Gives the runner what speculation needs beside the scheduler. Raises InvalidConfig for what it cannot do."""
    rejects = config.speculative_verification == "rejection"
    if isinstance(runner, TorchRunner):
        runner.speculate(None if draft is None else draft.drafter(runner._kv, config), rejects=rejects)
    elif draft is not None:
        raise InvalidConfig(
            "speculative", f"{config.speculative} is not built for several ranks yet; use ngram or suffix"
        )
    elif rejects:
        where = "several ranks" if config.tensor_parallel_size > 1 else "a GPU"
        raise InvalidConfig("speculative_verification", f"rejection is not built for {where} yet; use coupled")


@dataclass(frozen=True, slots=True)
class Computation:
    """What one rank computes with."""

    decoder: AnyDecoder
    runner: TorchRunner | CudaRunner
    dtype: torch.dtype
    max_model_len: int


def load_computation(
    folder: Path, config: EngineConfig, device: torch.device, group: RankGroup | None = None
) -> Computation:
    """A model folder on one device; of a group of ranks, this rank's share of it. Raises as `load_runner`."""
    torch.set_num_threads(config.num_threads or OWN_THREADS)
    fields = json.loads((folder / "config.json").read_text())
    dtype = _dtype(config, fields, device)
    decoder, max_model_len = load_decoder(folder, fields, dtype, device, config, group)
    if isinstance(decoder, NativeDecoder):
        torch.set_num_threads(1)  # its own threads want all cores, and torch's spin for a while behind every call
    log.info("its weights are ready: %s", "; ".join(decoder.choices.values()))
    runner = (
        _cuda_runner(decoder, max_model_len, config, dtype, group)
        if device.type == "cuda"
        else _cpu_runner(decoder, max_model_len, config, _kv_dtype(config, dtype))
    )
    return Computation(decoder, runner, dtype, max_model_len)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device", "is cuda, and this machine or this build of torch has none; use cpu or auto")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: EngineConfig, fields: dict[str, object], device: torch.device) -> torch.dtype:
    """Of activations and KV. auto, and around quantized matrices: fp32 on CPU; on GPU the checkpoint's own half
    precision, else bfloat16.
    """
    if config.dtype in _DTYPES:
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    stored = str(fields.get("dtype") or fields.get("torch_dtype"))
    return torch.float16 if stored == "float16" else torch.bfloat16


def _kv_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    return torch.int8 if config.kv_cache_dtype == "int8" else dtype


def _cpu_runner(decoder: AnyDecoder, max_model_len: int, config: EngineConfig, kv_dtype: torch.dtype) -> TorchRunner:
    bytes_per_block = block_bytes(decoder.config, config.block_size, kv_dtype)
    return TorchRunner(
        decoder,
        max_model_len,
        config.block_size,
        num_kv_blocks=config.num_kv_blocks
        or num_blocks_within(config.kv_cache_memory_bytes or _DEFAULT_CPU_POOL_BYTES, bytes_per_block),
        num_host_slots=int(config.swap_space * GIB) // bytes_per_block,
        dtype=kv_dtype,
    )


def _cuda_runner(
    decoder: AnyDecoder, max_model_len: int, config: EngineConfig, dtype: torch.dtype, group: RankGroup | None
) -> CudaRunner:
    from engine.cuda.device import CudaDevice
    from engine.cuda.load import cuda_runner

    return cuda_runner(CudaDevice(decoder.device), decoder, max_model_len, config, dtype, group)
