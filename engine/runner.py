"""Executes plans with a real model: moves blocks, runs the forward pass, draws tokens. Keeps KV, decides nothing."""

from __future__ import annotations

import json
import logging

import torch

from engine.batch import Batch, build_batch
from engine.config import EngineConfig, LoadedModel, ModelInfo
from engine.errors import DeviceFailed, InvalidConfig
from engine.kv_storage import KVStorage, block_bytes
from engine.logprobs import position_logprobs
from engine.models.load import AnyDecoder, load_decoder
from engine.plan import Plan, PositionLogprobs, Row, StepResult
from engine.sampler import Draw, sample
from engine.text.tokenizer import Tokenizer
from engine.weights import resolve
from engine.weights.digest import tokenizer_digest, weights_digest

log = logging.getLogger(__name__)

GIB = 1 << 30
_DEFAULT_CPU_POOL_BYTES = GIB
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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
        self.vocab_size = decoder.config.vocab_size
        self.max_model_len = max_model_len
        self.block_size, self.num_kv_blocks, self.num_host_slots = block_size, num_kv_blocks, num_host_slots
        self.decoder = decoder
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
        batch = build_batch(plan.rows, self.block_size, self.decoder.device)
        logits = self.decoder.forward(batch, self._kv)
        first_places = _first_logits(plan.rows)
        draws = [
            Draw(first + row.num_logits - 1, sequence)
            for row, first in zip(plan.rows, first_places, strict=True)
            for sequence in row.draws
        ]
        prompt_logprobs = {
            index: found
            for index, (row, first) in enumerate(zip(plan.rows, first_places, strict=True))
            if (found := _prompt_logprobs(row, logits[first : first + row.num_logits])) is not None
        }
        return StepResult(sample(logits, draws), prompt_logprobs)


def _first_logits(rows: list[Row]) -> list[int]:
    """Where each row's logits begin among the logits of all rows."""
    places, total = [], 0
    for row in rows:
        places.append(total)
        total += row.num_logits
    return places


def _prompt_logprobs(row: Row, logits: torch.Tensor) -> list[PositionLogprobs] | None:
    """About the prompt tokens after the row's last `num_logits` positions; None where the request did not ask."""
    num_top = row.sequence.params.prompt_logprobs
    if num_top is None:
        return None
    first = row.end - row.num_logits
    targets = row.sequence.prompt_token_ids[first + 1 : row.end + 1]
    return position_logprobs(logits[: len(targets)], targets, num_top)


def load_runner(model: str, config: EngineConfig) -> LoadedModel:
    """Loads an alias, folder, .gguf file, s3:// or hub id (`engine.weights.resolve`).

    Raises ModelLoadError for a model that cannot be used, InvalidConfig for settings that do not fit it.
    """
    folder = resolve(model)
    device = _device(config)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    fields = json.loads((folder / "config.json").read_text())
    dtype = _dtype(config, fields, device)
    decoder, max_model_len = load_decoder(folder, fields, dtype, device, config)
    vocab_size = decoder.config.vocab_size
    bytes_per_block = block_bytes(decoder.config, config.block_size, dtype)
    runner = TorchRunner(
        decoder,
        max_model_len,
        config.block_size,
        num_kv_blocks=config.num_kv_blocks or _num_blocks(decoder, config, bytes_per_block, dtype),
        num_host_slots=int(config.swap_space * GIB) // bytes_per_block,
        dtype=dtype,
    )
    tokenizer = Tokenizer(folder)
    log.info("loaded %s from %s: %s on %s; %s", model, folder, dtype, device, "; ".join(decoder.choices.values()))
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        info=ModelInfo(
            name=model,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=tuple(sorted(i for i in tokenizer.eos_token_ids if i < vocab_size)),
            weights_digest=weights_digest(folder),
            tokenizer_digest=tokenizer_digest(folder),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            kernels=decoder.kernels,
            chat_template=tokenizer.chat_template_source,
        ),
    )


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device", "is cuda, and this machine or this build of torch has none; use cpu or auto")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _dtype(config: EngineConfig, fields: dict[str, object], device: torch.device) -> torch.dtype:
    """auto: fp32 on CPU; on GPU the checkpoint's own half precision, else bfloat16."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    stored = str(fields.get("dtype") or fields.get("torch_dtype"))
    return torch.float16 if stored == "float16" else torch.bfloat16


def _num_blocks(decoder: AnyDecoder, config: EngineConfig, bytes_per_block: int, dtype: torch.dtype) -> int:
    """Blocks that fit the byte budget: the one given, 1 GiB on CPU, what a profiling forward leaves on GPU."""
    if config.kv_cache_memory_bytes is not None:
        budget = config.kv_cache_memory_bytes
    elif decoder.device.type == "cpu":
        budget = _DEFAULT_CPU_POOL_BYTES
    else:
        budget = _profiled_budget(decoder, config, dtype)
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise InvalidConfig("kv_cache_memory_bytes", f"leaves {budget} bytes and one block takes {bytes_per_block}")
    return num_blocks


def _profiled_budget(decoder: AnyDecoder, config: EngineConfig, dtype: torch.dtype) -> int:
    """GPU bytes left under `gpu_memory_utilization` after the largest step's peak."""
    num_tokens = config.max_num_batched_tokens
    num_blocks = -(-num_tokens // config.block_size)
    kv = KVStorage(decoder.config, config.block_size, num_blocks, 0, dtype, decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    decoder.forward(_profiling_batch(num_tokens, num_blocks, config, decoder.device), kv)
    free, total = torch.cuda.mem_get_info(decoder.device)
    others = total - free - torch.cuda.memory_reserved(decoder.device)
    peak = torch.cuda.max_memory_allocated(decoder.device)
    return int(total * config.gpu_memory_utilization) - peak - others


def _profiling_batch(num_tokens: int, num_blocks: int, config: EngineConfig, device: torch.device) -> Batch:
    """One prefill as long as a step may be, with the most logits that sampling may want."""
    from kernels.paged_attention.rows import PagedRows

    places = torch.arange(num_tokens, device=device)
    rows = PagedRows([0, num_tokens], [num_tokens], [list(range(num_blocks))], config.block_size)
    return Batch(torch.zeros_like(places), places, places, places[-config.max_num_seqs :], rows)
