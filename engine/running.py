"""Sequences with a seat, in the policy's order: those that decode, each with its row, and those that prefill. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from engine.plan import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.sequence import Sequence


class RunningSet:
    def __init__(self, max_num_seqs: int) -> None:
        self.decoding: list[Row] = []  # each row moves on with its sequence, one token a step
        self.prefilling: list[Sequence] = []
        self.needy: list[Row] = []  # decoding rows that may need a block before they go on
        self.max_num_seqs = max_num_seqs

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Sequence]:
        for row in self.decoding:
            yield row.sequence
        yield from self.prefilling

    @property
    def num_seats_taken(self) -> int:
        return len(self.decoding) + sum(map(self.num_seats, self.prefilling))

    def num_seats(self, sequence: Sequence) -> int:
        """Seats that a sequence takes: one, or one for each choice that will fork from it."""
        return min(sequence.num_forks, self.max_num_seqs)

    def has_seats_for(self, sequence: Sequence, *, besides: int = 0) -> bool:
        """Whether it could start, if `besides` more seats were free."""
        return self.num_seats_taken - besides + self.num_seats(sequence) <= self.max_num_seqs

    def start(self, sequence: Sequence) -> None:
        insort(self.prefilling, sequence, key=_order)

    def begin_decode(self, sequence: Sequence) -> Row:
        """Moves a prefilled sequence on to decoding its newest token."""
        self.prefilling.remove(sequence)
        newest = sequence.output_token_ids[-1]
        row = Row(sequence, sequence.num_computed_tokens, [newest], sequence.block_table, 1, [sequence])
        insort(self.decoding, row, key=_row_order)
        return row

    def take_needy(self) -> list[Row]:
        """The decoding rows that may need a block now, in order; asked once a step."""
        needy, self.needy = self.needy, []
        return sorted(needy, key=_row_order)

    def last(self) -> Sequence:
        """The running sequence that goes last, decoding or not."""
        tails = [row.sequence for row in self.decoding[-1:]] + self.prefilling[-1:]
        return max(tails, key=_order)

    def leave(self, sequence: Sequence) -> None:
        index = bisect_left(self.decoding, sequence.order, key=_row_order)
        if index < len(self.decoding) and self.decoding[index].sequence is sequence:
            del self.decoding[index]
        else:
            self.prefilling.remove(sequence)


def _order(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.order


def _row_order(row: Row) -> tuple[float, int, int]:
    return row.sequence.order
