"""A second decoder that proposes: it writes tokens ahead of the target, one forward for each place, all rows together.

Two kinds, by whose KV it reads:

    draft   a smaller model with a KV storage of its own under the same block tables. What of a sequence it has not
            computed yet, it computes when it drafts (`Row.draft_start` says from where); what it computed for
            rejected proposals is written over.
    self    the target's int8 copy, in the target's own slots: it reads the target's KV, and what it writes there for
            proposals the target's verification writes over in the same step.

It draws with the target's noise and processors, so that where its logits are near the target's it says the same, at any
temperature.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from engine.batch import build_batch
from engine.plan import Plan, Row
from engine.processors import process
from engine.sampler import Draw, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.kv_storage import KVStorage
    from engine.models.load import AnyDecoder
    from engine.sequence import Sequence

_MAX_TOKENS = 512  # of one forward that catches up
DraftLogits = dict[tuple[int, int], torch.Tensor]  # (row of the plan, place) -> [vocab], processed, fp32


class Drafter:
    def __init__(
        self,
        decoder: AnyDecoder,
        kv: KVStorage,
        block_size: int,
        *,
        has_own_kv: bool,
        keeps_logits: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`keeps_logits`: for rejection, which asks how likely each proposal was."""
        self._decoder, self._kv, self._block_size = decoder, kv, block_size
        self._has_own_kv = has_own_kv
        self._keeps_logits = keeps_logits
        self._clock = clock

    def draft(self, plan: Plan) -> tuple[float, DraftLogits]:
        """Puts proposals into the rows that are to verify some; returns the seconds it took, and the logits kept."""
        if self._has_own_kv and plan.copies:
            self._kv.apply(Plan(plan.step_index, copies=plan.copies))
        rows = [(index, row) for index, row in enumerate(plan.rows) if row.num_proposals]
        if not rows:
            return 0.0, {}
        began = self._clock()
        kept: DraftLogits = {}
        for place in range(max(row.num_proposals for _, row in rows)):
            drafting = [(index, row) for index, row in rows if row.num_proposals > place]
            logits = self._forward([self._part(row, place) for _, row in drafting])
            ahead = [row.sequence.ahead(row.proposals[:place]) for _, row in drafting]
            drawn = sample(logits, [Draw(index, sequence) for index, sequence in enumerate(ahead)])
            for (_, row), sampled in zip(drafting, drawn, strict=True):
                row.token_ids[1 + place] = sampled.token_id or 0
            if self._keeps_logits:
                for (index, _), processed in zip(drafting, _processed(logits, ahead), strict=True):
                    kept[index, place] = processed
        return self._clock() - began, kept

    def _part(self, row: Row, place: int) -> Row:
        """What the decoder computes so that its logits say the row's proposal at `place`."""
        if place:
            return Row(row.sequence, row.start + place, [row.token_ids[place]], row.block_table, 1)
        start = row.draft_start if self._has_own_kv else row.start
        while row.start + 1 - start > _MAX_TOKENS:
            chunk = row.sequence.tokens(start, start + _MAX_TOKENS)
            self._forward([Row(row.sequence, start, chunk, row.block_table, 0)])
            start += _MAX_TOKENS
        return Row(row.sequence, start, row.sequence.tokens(start, row.start + 1), row.block_table, 1)

    def _forward(self, rows: list[Row]) -> torch.Tensor:
        decoder = self._decoder
        return decoder.forward(build_batch(rows, self._block_size, decoder.device, decoder.index_dtype), self._kv)


def _processed(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    changed = logits.clone()
    process(changed, sequences)
    return changed
