"""How an engine is set up, and what it learns from a model when it loads one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

from engine.errors import InvalidConfig

if TYPE_CHECKING:
    from engine.plan import Runner
    from engine.text.tokenizer import Tokenizer

BLOCK_SIZES = (8, 16, 32, 64)

Policy = Literal["fcfs", "priority", "deadline", "fair"]
PreemptionMode = Literal["auto", "recompute", "swap"]
Speculative = Literal["auto", "none", "ngram", "suffix", "draft", "self"]
Verification = Literal["coupled", "rejection"]
Numerics = Literal["auto", "invariant", "fast"]

MODEL_PROPOSERS = ("draft", "self")  # those that compute, and so depend on the runner

# What needs tensor_parallel_size 1: field -> (values, what to use instead)
_ON_ONE_RANK: dict[str, tuple[tuple[str, ...], str]] = {
    "cpu_kernels": (("native",), "torch or auto"),
    "dtype": (("int8", "int4"), "auto"),
    "kv_cache_dtype": (("int8",), "auto"),
    "speculative": (MODEL_PROPOSERS, "ngram or suffix"),
    "speculative_verification": (("rejection",), "coupled"),
    "numerics": (("invariant",), "auto or fast"),
}

# What makes a token depend on its company, whatever computes: field, value, what to use instead
_NEVER_INVARIANT = (
    ("cpu_kernels", "torch", "native"),
    ("device", "cuda", "cpu"),
    ("speculative_verification", "rejection", "coupled"),
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine, with vLLM's names where it has them. A bad value raises InvalidConfig.

    Each field is also a flag and an environment variable of the worker.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    # auto: the device's best, float32 on CPU; int8: matrices in int8 on the native CPU path, all else in float32
    # int8 and int4 on GPU: matrices in Triton's products, all else in half precision
    dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "int4"] = "auto"
    kv_cache_dtype: Literal["auto", "int8"] = "auto"  # auto: as activations; int8: on the native CPU path
    cpu_kernels: Literal["auto", "native", "torch"] = "auto"  # on CPU; auto: native where it can run the model
    # invariant: a model is refused where a row's bits could depend on its company; fast: whatever is fastest, promised
    # or not; auto: invariant where the kernels are
    numerics: Numerics = "auto"
    tensor_parallel_size: int = 1  # devices that share one model: GPUs, or processes of one CPU
    cuda_graphs: bool = True  # on GPU: decode steps are captured once and replayed
    max_model_len: int | None = None  # tokens of context; None: the model's own
    num_threads: int | None = None  # of the CPU's arithmetic; None: one for each core

    block_size: int = 16  # token slots per KV block
    num_kv_blocks: int | None = None  # size of the pool; None: sized by the two fields below
    kv_cache_memory_bytes: int | None = None  # size of the pool in bytes; None: 1 GiB on CPU, profiled on GPU
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, activations and pool together
    swap_space: float = 0.0  # GiB of host memory for blocks taken off the device
    enable_prefix_caching: bool = True
    enable_host_prefix_cache: bool = False  # second tier: evicted prefix blocks stay in swap_space; not on CPU
    preemption_mode: PreemptionMode = "auto"  # auto: whichever is estimated to cost less time

    max_num_seqs: int = 64  # sequences that run at once
    max_num_batched_tokens: int = 512  # tokens that one step computes, decodes and prefill chunks together
    max_step_seconds: float | None = None  # while anything decodes, prefill chunks are cut to stay under this
    overlap_scheduling: Literal["auto", "on", "off"] = "auto"  # plan a step while the one before runs; auto: on GPU
    scheduling_policy: Policy = "fcfs"
    priority_seconds: float = 60.0  # policy priority: so many seconds of waiting outweigh one level

    # what guesses the next tokens; auto: ngram where no bit can change by it (ModelInfo.is_invariant), or, on a CPU,
    # where numerics is fast; else none
    speculative: Speculative = "auto"
    speculative_model: str | None = None  # of speculative draft: a smaller model with the same vocabulary
    num_speculative_tokens: int = 10  # guesses verified at once for a sequence, at most
    speculative_adaptive: bool = True  # fewer where measured acceptance and costs say so, down to none; else always all
    speculative_verification: Verification = "coupled"  # rejection: the distribution is kept, the tokens are not

    fake_seconds_per_step: float = 0.0  # model `fake`: simulated cost of a step
    fake_seconds_per_token: float = 0.0  # model `fake`: simulated cost of each token computed
    fake_eos_every: int = 0  # model `fake`: one token in so many ends the sequence; 0: none does
    fake_acceptance: float = 0.7  # model `fake`, speculative draft: share of its guesses that are right
    fake_seconds_per_draft: float = 0.0  # model `fake`, speculative draft: cost of one guess for each sequence
    fake_poison: str | None = None  # model `fake`: a prompt that contains this text kills the process

    def __post_init__(self) -> None:
        _check_literals(self)
        if self.block_size not in BLOCK_SIZES:
            raise InvalidConfig("block_size", f"is {self.block_size}; choose one of {', '.join(map(str, BLOCK_SIZES))}")
        for name in ("max_model_len", "num_threads", "num_kv_blocks", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidConfig(name, f"is {value}; give a number above 0, or leave it out")
        for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens"):
            if getattr(self, name) < 1:
                raise InvalidConfig(name, f"is {getattr(self, name)}; give a number above 0")
        for name in (
            "swap_space",
            "fake_seconds_per_step",
            "fake_seconds_per_token",
            "fake_seconds_per_draft",
            "fake_eos_every",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidConfig(name, f"is {getattr(self, name)}; give 0 or more")
        if not 0 <= self.fake_acceptance <= 1:
            raise InvalidConfig("fake_acceptance", f"is {self.fake_acceptance}; give a share from 0 to 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidConfig("gpu_memory_utilization", f"is {self.gpu_memory_utilization}; give a share up to 1")
        if self.max_step_seconds is not None and not 0 < self.max_step_seconds < math.inf:
            raise InvalidConfig("max_step_seconds", f"is {self.max_step_seconds}; give a number above 0, or leave it")
        if not 0 < self.priority_seconds < math.inf:
            raise InvalidConfig("priority_seconds", f"is {self.priority_seconds}; give a number above 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidConfig(
                "max_num_batched_tokens",
                f"is {self.max_num_batched_tokens}, under max_num_seqs {self.max_num_seqs}: "
                "a step could not decode every running sequence; raise it or lower max_num_seqs",
            )
        for name, (values, instead) in _ON_ONE_RANK.items():
            if self.tensor_parallel_size > 1 and getattr(self, name) in values:
                raise InvalidConfig(name, f"is {getattr(self, name)}, which one rank alone can do; use {instead}")
        if self.enable_host_prefix_cache and not (self.enable_prefix_caching and self.swap_space > 0):
            raise InvalidConfig("enable_host_prefix_cache", "needs enable_prefix_caching and a swap_space above 0")
        if self.fake_poison == "":
            raise InvalidConfig("fake_poison", "is empty and would match every prompt; give a text, or leave it out")
        if self.numerics == "invariant":
            for name, value, instead in _NEVER_INVARIANT:
                if getattr(self, name) == value:
                    raise InvalidConfig(
                        "numerics", f"is invariant, which {name} {value} cannot keep; use {instead}, or numerics auto"
                    )
        if (self.speculative == "draft") != (self.speculative_model is not None):
            raise InvalidConfig("speculative_model", "goes with speculative draft; name a model, or leave both out")

    def for_model(self, info: ModelInfo) -> EngineConfig:
        """What `auto` leaves to the model, chosen. Raises InvalidConfig for a promise that the model cannot keep."""
        if self.numerics == "invariant" and not info.is_invariant:
            raise InvalidConfig(
                "numerics",
                f"is invariant, and {info.kernels} on {info.device} promises no row that neighbours leave as it is: "
                "use auto or fast, or a model and a machine for the native CPU path",
            )
        if self.speculative != "auto":
            return self
        may_guess = info.is_invariant or (self.numerics == "fast" and info.device == "cpu")
        could_guess = may_guess and self.overlap_scheduling != "on"  # which rests while anything is guessed
        return replace(self, speculative="ngram" if could_guess else "none")


def _check_literals(config: EngineConfig) -> None:
    for name, hint in get_type_hints(EngineConfig, localns={"Runner": object, "Tokenizer": object}).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            choices = ", ".join(map(str, get_args(hint)))
            raise InvalidConfig(name, f"is {getattr(config, name)!r}; choose one of {choices}")


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a loaded model says about itself."""

    name: str
    max_model_len: int  # tokens of context, the config's bound included
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    tokenizer_digest: str
    dtype: str
    kv_dtype: str
    device: str
    kernels: str  # which arithmetic: part of the numerics profile
    tensor_parallel_size: int = 1  # likewise
    is_invariant: bool = False  # a row's numbers are the same to the bit alone and among any others
    chat_template: str | None = None
    max_draft_len: int | None = None  # tokens of context of the model that drafts for it, where one does


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model ready to serve: whatever executes its plans, its tokenizer, and what it says about itself."""

    runner: Runner
    tokenizer: Tokenizer
    info: ModelInfo
