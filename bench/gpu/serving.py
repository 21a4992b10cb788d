"""The engine end to end: scheduler, runner and draws over a Llama-8B-shaped model. Prefill and decode by themselves,
with graphs and without; and blocks swapped beside the forward.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.gpu.budget import Budget
from bench.gpu.kernels import shape_of
from bench.gpu.machine import Machine
from bench.gpu.model import decoder, layer_weights, num_layers_that_fit
from bench.gpu.roofs import Roofs
from engine.config import EngineConfig
from engine.costs import StepCosts
from engine.cuda.buckets import Buckets
from engine.cuda.device_sampler import DeviceSampler
from engine.cuda.runner import CudaRunner
from engine.kv_storage import KVStorage, block_bytes
from engine.models.quantized import quantize
from engine.params import SamplingParams
from engine.plan import BlockMove, Plan
from engine.scheduler import Scheduler
from engine.sequence import Request, Sequence
from kernels.calls import Shape

_BLOCK_SIZE = 16
_NUM_SWAPPED = 64  # blocks


@dataclass(frozen=True)
class Sizes:
    num_layers: int
    batches: tuple[int, ...]  # sequences that decode together
    context_len: int  # of each of them
    num_steps: int  # decode steps that are measured
    prompt_len: int  # of the prefill measurement
    num_prompts: int
    max_num_batched_tokens: int
    num_blocks: int

    @property
    def max_model_len(self) -> int:
        return max(self.prompt_len, self.context_len + self.num_steps) + 2 * _BLOCK_SIZE


def sizes_of(machine: Machine, shape: Shape) -> Sizes:
    if machine.is_dry:
        return Sizes(1, (2,), 20, 3, 40, 2, 64, 32)
    return Sizes(num_layers_that_fit(machine, shape, 32), (1, 16, 64), 512, 64, 2048, 8, 8192, 4096)


class Serving:
    """The model is made once; a runner with graphs and one without share its weights and its KV pool."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._shape = shape_of(machine)
        self._sizes = sizes = sizes_of(machine, self._shape)
        self._decoder, self._weights = decoder(machine, self._shape, sizes.num_layers, sizes.max_model_len)
        host_slots = 2 * _NUM_SWAPPED if not machine.is_dry else 8
        self._kv = KVStorage(
            self._decoder.config, _BLOCK_SIZE, sizes.num_blocks, host_slots, self._shape.dtype, machine.torch_device
        )
        self._runners = {"graphs": self._runner(True), "kernel by kernel": self._runner(False)}

    def measure(self, roofs: Roofs, budget: Budget) -> dict[str, Any]:
        sizes = self._sizes
        weights = self._num_weights()
        found: dict[str, Any] = {"layers": sizes.num_layers, "weights": weights}
        found["prefill"] = self._prefill(weights, roofs)
        skipped: list[str] = []
        measured = [(name, batch) for batch in sizes.batches for name in self._runners]
        for name, batch in budget.while_it_lasts(measured, skipped, lambda each: f"{each[1]} decodes, {each[0]}"):
            found[f"{batch} decodes, {name}"] = self._decode(self._runners[name], batch, weights, roofs)
        found["graphs_replayed"] = graphs.num_replays if (graphs := self._runners["graphs"].graphs) else 0
        return {**found, "skipped": skipped}

    def swap(self, roofs: Roofs) -> dict[str, Any]:
        """Blocks to the host and back, alone and beside decode steps."""
        runner, machine = self._runners["graphs"], self._machine
        count = min(_NUM_SWAPPED, self._kv.num_host_slots)
        moves = [BlockMove(index, index) for index in range(count)]
        num_bytes = count * block_bytes(self._decoder.config, _BLOCK_SIZE, self._shape.dtype)
        out = self._seconds(lambda: runner.execute(Plan(0, swap_out=moves)))
        back = self._seconds(lambda: runner.execute(Plan(0, swap_in=moves)))
        machine.synchronize()
        return {
            "blocks": count,
            "bytes": num_bytes,
            "out_gigabytes_per_second": round(num_bytes / out / 1e9, 2),
            "in_gigabytes_per_second": round(num_bytes / back / 1e9, 2),
            "out_share_of_roof": round(num_bytes / out / roofs.to_host_bytes_per_second, 3),
            "in_share_of_roof": round(num_bytes / back / roofs.from_host_bytes_per_second, 3),
        }

    def quantized(self, roofs: Roofs, budget: Budget) -> dict[str, Any]:
        """Decode steps with the matrices in int8. The last thing to measure: it changes the model for good."""
        self._runners.clear()
        quantize(self._weights, "int8", is_invariant=True)
        runner, found = self._runner(True), {}
        weights = self._num_weights() // self._shape.dtype.itemsize  # a byte each, counted as numbers of the dtype
        skipped: list[str] = []
        for batch in budget.while_it_lasts(self._sizes.batches, skipped, lambda batch: f"{batch} decodes"):
            found[f"{batch} decodes, int8"] = self._decode(runner, batch, weights, roofs)
        return {**found, "skipped": skipped}

    def _num_weights(self) -> int:
        """Numbers that a decode step reads."""
        return self._sizes.num_layers * layer_weights(self._shape) + self._shape.vocab * self._shape.hidden

    def _runner(self, has_graphs: bool) -> CudaRunner:
        sizes, device = self._sizes, self._machine.device
        return CudaRunner(
            device,
            self._decoder,
            self._kv,
            DeviceSampler(device),
            max_model_len=sizes.max_model_len,
            block_size=_BLOCK_SIZE,
            buckets=Buckets(max(sizes.batches), sizes.max_model_len) if has_graphs else None,
        )

    def _prefill(self, weights: int, roofs: Roofs) -> dict[str, Any]:
        sizes = self._sizes
        self._run(self._runners["kernel by kernel"], 1, sizes.prompt_len, 1)
        seconds = self._run(self._runners["kernel by kernel"], sizes.num_prompts, sizes.prompt_len, 1)[0]
        num_tokens = sizes.num_prompts * sizes.prompt_len
        return {
            "tokens_per_second": round(num_tokens / seconds, 1),
            "share_of_roof": round(2 * weights * num_tokens / seconds / roofs.matmul_flops, 3),
        }

    def _decode(self, runner: CudaRunner, batch: int, weights: int, roofs: Roofs) -> dict[str, Any]:
        sizes = self._sizes
        self._run(runner, batch, sizes.context_len, 3)  # compiles and captures
        seconds, num_steps = self._run(runner, batch, sizes.context_len, sizes.num_steps, is_decode_timed=True)
        context = (sizes.context_len + sizes.num_steps / 2) * batch
        kv = block_bytes(self._decoder.config, 1, self._shape.dtype) * context
        least = (weights * self._shape.dtype.itemsize + kv) / (roofs.copy_bytes_per_second)
        return {
            "tokens_per_second": round(batch * num_steps / seconds, 1),
            "milliseconds_per_step": round(seconds / num_steps * 1e3, 3),
            "share_of_roof": round(least * num_steps / seconds, 3),
        }

    def _run(
        self, runner: CudaRunner, num_requests: int, prompt_len: int, num_tokens: int, is_decode_timed: bool = False
    ) -> tuple[float, int]:
        """(seconds, steps) of requests that come together; or of those steps in which all of them decode."""
        scheduler = self._scheduler(max(num_requests, 1))
        for index in range(num_requests):
            scheduler.add(self._request(index, prompt_len, num_tokens))
        seconds, num_steps = 0.0, 0
        while scheduler.num_requests:
            began = time.perf_counter()
            plan = scheduler.plan(time.monotonic())
            result = runner.execute(plan)  # the tokens are there at its return
            scheduler.commit(plan, result)
            if not is_decode_timed or plan.num_decodes == num_requests:
                seconds += time.perf_counter() - began
                num_steps += 1
        return seconds, num_steps

    def _scheduler(self, num_requests: int) -> Scheduler:
        sizes = self._sizes
        config = EngineConfig(
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(sizes.max_num_batched_tokens, num_requests),
            enable_prefix_caching=False,
        )
        return Scheduler(
            config,
            num_blocks=sizes.num_blocks,
            num_host_slots=0,
            max_model_len=sizes.max_model_len,
            costs=StepCosts(),
        )

    def _request(self, index: int, prompt_len: int, num_tokens: int) -> Request:
        tokens = random.Random(index).choices(range(self._shape.vocab), k=prompt_len)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
        request = Request(str(index), tokens, params, seed=index)
        request.sequences.append(Sequence(request, 0, index))
        return request

    def _seconds(self, call: Callable[[], object]) -> float:
        """Of a call whose work goes to a stream of its own."""
        call()
        self._machine.synchronize()
        began = time.perf_counter()
        call()
        self._machine.synchronize()
        return time.perf_counter() - began
