"""Executes plans on a GPU: decodes in graphs, draws on the device, swaps beside the forward. Decides nothing.

launch(plan)   moves, inputs, forward, draws: all started, nothing waited for
result()       waits for the tokens

main stream    | waits of fences | copies | inputs | graph or forward | draws | tokens to the host |
copy stream    | swap-out, swap-in of this plan ............... |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import build_batch
from engine.beam_sampler import in_order, name_candidates, of_beams
from engine.cuda.block_mover import BlockMover
from engine.cuda.buckets import Buckets
from engine.cuda.decode_inputs import empty_inputs
from engine.cuda.device import Device
from engine.cuda.device_sampler import DeviceSampler, PendingDraws
from engine.cuda.graphs import DecodeGraphs
from engine.cuda.staging import Staging, num_bytes_of
from engine.errors import DeviceFailed
from engine.kv_storage import KVStorage
from engine.models.decoder import Decoder
from engine.models.transformers_fallback import TransformersDecoder
from engine.plan import Plan, PositionLogprobs, Row, Sampled, StepResult
from engine.row_places import draws_of, prompt_logprobs
from engine.sampler import Draw


class CudaRunner:
    """A decoder, its KV storage, graphs and the device's sampler behind the Runner protocol."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder | TransformersDecoder,
        kv: KVStorage,
        sampler: DeviceSampler,
        *,
        max_model_len: int,
        block_size: int,
        buckets: Buckets | None,
    ) -> None:
        """`buckets`: sizes of graphs; None, or a decoder that cannot be captured: every step runs kernel by kernel."""
        self.vocab_size = decoder.config.vocab_size
        self.max_model_len = max_model_len
        self.block_size, self.num_kv_blocks, self.num_host_slots = block_size, kv.num_blocks, kv.num_host_slots
        self.decoder = decoder
        self.graphs: DecodeGraphs | None = None
        if buckets is not None and isinstance(decoder, Decoder) and decoder.can_be_captured:
            staging = Staging(device, num_bytes_of(empty_inputs(buckets.largest, block_size)))
            self.graphs = DecodeGraphs(device, decoder, kv, staging, buckets, block_size)
        self._kv, self._sampler = kv, sampler
        self._mover = BlockMover(device, kv, block_size)
        self.choices = {**sampler.choices, **self._mover.choices}  # what runs, and why

    def execute(self, plan: Plan) -> StepResult:
        """Raises DeviceFailed where the device itself broke; anything else concerns this plan alone."""
        try:
            return self._launch(plan).result()
        except torch.AcceleratorError as error:  # sticky: every later call would fail as well
            raise DeviceFailed(f"{self.decoder.device}: {error}") from error

    def _launch(self, plan: Plan) -> LaunchedStep:
        self._mover.move(plan)
        if not plan.rows:
            return LaunchedStep([], None, [], {})
        self._mover.wait_for(plan.rows)
        logits = self._forward(plan.rows)
        asked = prompt_logprobs(plan.rows, logits)
        draws = draws_of(plan.rows)
        drawn, named = of_beams(draws, False), of_beams(draws, True)
        candidates = name_candidates(logits, named) if named else []
        return LaunchedStep(draws, self._sampler.draw(logits, drawn) if drawn else None, candidates, asked)

    def _forward(self, rows: list[Row]) -> torch.Tensor:
        bucket = None if self.graphs is None else self.graphs.bucket_for(rows)
        if self.graphs is not None and bucket is not None:
            return self.graphs.run(rows, bucket)
        return self.decoder.forward(build_batch(rows, self.block_size, self.decoder.device), self._kv)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device works on."""

    draws: list[Draw]
    drawn: PendingDraws | None  # None: nothing to draw
    named: list[Sampled]  # candidates of beams, which nobody goes on from before they are ranked
    prompt_logprobs: dict[int, list[PositionLogprobs]]

    def result(self) -> StepResult:
        drawn = self.drawn.result() if self.drawn is not None else []
        return StepResult(in_order(self.draws, drawn, self.named), self.prompt_logprobs)
