"""Decode steps as captured graphs: hundreds of kernels, started by one call. Captured when a bucket is first needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import Batch
from engine.cuda.buckets import Bucket, Buckets
from engine.cuda.decode_inputs import decode_inputs, empty_inputs
from engine.cuda.device import Device, Graph
from engine.cuda.followed import put_tokens
from engine.cuda.staging import Staging
from engine.kv_storage import KVStorage
from engine.models.decoder import Decoder
from engine.plan import RowShape
from kernels.paged_attention.rows import PagedRows, RowTensors


class DecodeGraphs:
    def __init__(
        self, device: Device, decoder: Decoder, kv: KVStorage, staging: Staging, buckets: Buckets, block_size: int
    ) -> None:
        """`staging`: with room for the largest bucket's inputs (`decode_inputs.empty_inputs`)."""
        self.num_replays = 0
        self._device, self._decoder, self._kv, self._staging = device, decoder, kv, staging
        self._buckets, self._block_size = buckets, block_size
        self._graphs: dict[Bucket, Graph] = {}

    def bucket_for(self, rows: Sequence[RowShape]) -> Bucket | None:
        """None where the step is no pure decode, or too large: it runs without a graph."""
        if any(len(row.token_ids) != 1 or row.num_logits != 1 for row in rows):
            return None
        return self._buckets.smallest_for(len(rows), max(row.end for row in rows))

    def run(self, rows: Sequence[RowShape], bucket: Bucket, last: torch.Tensor | None) -> torch.Tensor:
        """Logits [len(rows), vocab], fp32, until the next run. `bucket`: what `bucket_for` has said; `last`: tokens of
        the last step's draws, where rows follow them.
        """
        inputs = self._staging.upload(decode_inputs(rows, bucket, self._block_size))
        put_tokens(rows, last, inputs["token_ids"])
        if bucket not in self._graphs:
            self._graphs[bucket] = self._capture(bucket)
        graph = self._graphs[bucket]
        graph.replay()
        self.num_replays += 1
        return graph.output[: len(rows)]

    def _capture(self, bucket: Bucket) -> Graph:
        inputs = self._staging.views(empty_inputs(bucket, self._block_size))
        batch = Batch(
            inputs["token_ids"],
            inputs["positions"],
            inputs["slots"],
            torch.arange(bucket.num_rows, device=self._device.torch_device),
            _bounds(bucket, self._block_size),
            RowTensors(inputs["query_starts"], inputs["context_lens"], inputs["block_tables"]),
        )
        attends = self._decoder.attends(batch)
        return self._device.capture(lambda: self._decoder.forward(batch, self._kv, attends))


def _bounds(bucket: Bucket, block_size: int) -> PagedRows:
    """Every row with one query and the longest context."""
    num_rows = bucket.num_rows
    return PagedRows(list(range(num_rows + 1)), [bucket.context_len] * num_rows, [[]] * num_rows, block_size)
