"""Rank 0: tells the other ranks each step, computes its own part of it, and draws the tokens."""

from __future__ import annotations

from engine.cuda.runner import CudaRunner
from engine.errors import DeviceFailed
from engine.parallel.order import order_of
from engine.parallel.ranks import Ranks
from engine.parallel.torch_group import TorchGroup
from engine.plan import Plan, StepResult
from engine.runner import TorchRunner


class ParallelRunner:
    """The Runner protocol over all ranks. Where one fails, all have: an exchange cannot be made up for."""

    def __init__(self, own: TorchRunner | CudaRunner, ranks: Ranks, group: TorchGroup) -> None:
        self.vocab_size, self.max_model_len = own.vocab_size, own.max_model_len
        self.block_size, self.num_kv_blocks, self.num_host_slots = own.block_size, own.num_kv_blocks, own.num_host_slots
        self._own, self._ranks, self._group = own, ranks, group

    def execute(self, plan: Plan) -> StepResult:
        """Raises DeviceFailed where a rank is lost; IndexError for a row whose blocks do not cover its tokens."""
        for row in plan.rows:  # before anyone is told
            if len(row.block_table) * self.block_size < row.end:
                raise IndexError(f"{len(row.block_table)} blocks do not hold {row.end} tokens")
        self._ranks.send(order_of(plan))
        try:
            logits = self._own.forward(plan)
        except DeviceFailed:
            raise
        except Exception as error:
            raise self._ranks.loss(error) from error
        return self._own.drawn(plan, logits)

    def close(self) -> None:
        """Ends the other ranks."""
        self._ranks.close()
        self._group.close()
