"""What rank 0 tells the other ranks: one step's moves and rows, without whom they belong to. Pure."""

from __future__ import annotations

import msgspec

from engine.plan import BlockMove, Plan


class RowOrder(msgspec.Struct, array_like=True, frozen=True):
    start: int
    token_ids: list[int]
    block_table: list[int]
    num_logits: int
    follows: int | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class StepOrder(msgspec.Struct, array_like=True, frozen=True):
    rows: list[RowOrder]
    copies: list[BlockMove]
    swap_out: list[BlockMove]
    swap_in: list[BlockMove]


def order_of(plan: Plan) -> StepOrder:
    rows = [RowOrder(row.start, row.token_ids, row.block_table, row.num_logits) for row in plan.rows]
    return StepOrder(rows, plan.copies, plan.swap_out, plan.swap_in)
