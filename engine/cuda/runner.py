"""Executes plans on a GPU: decodes in graphs, draws on the device, swaps beside the forward. Decides nothing.

launch(plan)   moves, inputs, forward, draws: all started, nothing waited for
result()       waits for the tokens

main stream    | waits of fences | copies | inputs | graph or forward | draws | tokens to the host |
copy stream    | swap-out, swap-in of this plan ............... |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.batch import build_batch
from engine.beam_sampler import in_order, name_candidates, of_beams
from engine.cuda.block_mover import BlockMover
from engine.cuda.buckets import Buckets
from engine.cuda.decode_inputs import empty_inputs
from engine.cuda.device import Device
from engine.cuda.device_sampler import DeviceSampler, PendingDraws
from engine.cuda.followed import put_tokens
from engine.cuda.graphs import DecodeGraphs
from engine.cuda.staging import Staging, num_bytes_of
from engine.errors import DeviceFailed
from engine.kv_storage import KVStorage
from engine.launcher import FailedStep, Launched
from engine.models.decoder import Decoder
from engine.models.transformers_fallback import TransformersDecoder
from engine.plan import Plan, PositionLogprobs, Sampled, StepResult, StepShape
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
        self._last: torch.Tensor | None = None  # the tokens that the last launched plan draws
        self._mover = BlockMover(device, kv, block_size)
        self.choices = {**sampler.choices, **self._mover.choices}  # what runs, and why

    def execute(self, plan: Plan) -> StepResult:
        """Raises DeviceFailed where the device itself broke; anything else concerns this plan alone."""
        result = self.launch(plan).result()
        if not plan.rows:  # moves alone, such as a measurement's: they are done when it returns
            with device_failures(self.decoder.device):
                self._mover.finish()
        return result

    def launch(self, plan: Plan) -> Launched:
        """Starts the plan. A row that follows a draw of the last plan launched takes its token on the device."""
        last, self._last = self._last, None
        try:
            with device_failures(self.decoder.device):
                step = self._start_draws(plan, self.forward(plan, last))
        except DeviceFailed:
            raise
        except Exception as error:
            return FailedStep(error)
        self._last = step.drawn.token_ids if step.drawn is not None else None
        return step

    def drawn(self, plan: Plan, logits: torch.Tensor | None) -> StepResult:
        """What comes of the plan's logits."""
        return self._start_draws(plan, logits).result()

    def _start_draws(self, plan: Plan, logits: torch.Tensor | None) -> LaunchedStep:
        if logits is None:
            return LaunchedStep(self.decoder.device, [], None, [], {})
        asked = prompt_logprobs(plan.rows, logits)
        draws = draws_of(plan.rows)
        drawn, named = of_beams(draws, False), of_beams(draws, True)
        candidates = name_candidates(logits, named) if named else []
        pending = self._sampler.draw(logits, drawn) if drawn else None
        return LaunchedStep(self.decoder.device, draws, pending, candidates, asked)

    def forward(self, plan: StepShape, last: torch.Tensor | None = None) -> torch.Tensor | None:
        """The plan's moves and its logits [wanted, vocab], until the next step; None where it has no rows.

        `last`: the tokens of the last step's draws, int64, where rows follow them.
        """
        self._mover.move(plan)
        rows = plan.rows
        if not rows:
            return None
        self._mover.wait_for(rows)
        bucket = None if self.graphs is None else self.graphs.bucket_for(rows)
        if self.graphs is not None and bucket is not None:
            return self.graphs.run(rows, bucket, last)
        batch = build_batch(rows, self.block_size, self.decoder.device)
        put_tokens(rows, last, batch.token_ids)
        return self.decoder.forward(batch, self._kv)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device works on."""

    device: torch.device
    draws: list[Draw]
    drawn: PendingDraws | None  # None: nothing to draw
    named: list[Sampled]  # candidates of beams, which nobody goes on from before they are ranked
    prompt_logprobs: dict[int, list[PositionLogprobs]]

    def result(self) -> StepResult:
        with device_failures(self.device):
            drawn = self.drawn.result() if self.drawn is not None else []
        return StepResult(in_order(self.draws, drawn, self.named), self.prompt_logprobs)


@contextmanager
def device_failures(device: torch.device) -> Iterator[None]:
    """Raises DeviceFailed for what the device itself reports: it is sticky, every later call would fail as well."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceFailed(f"{device}: {error}") from error
