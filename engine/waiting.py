"""Sequences without a seat, in the policy's order: a heap of static keys. Pure."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from engine.sequence import SequenceState

if TYPE_CHECKING:
    from engine.sequence import Sequence

_REBUILD_ABOVE = 64  # finished entries left in the heap, and more than half of it


class WaitingQueue:
    """Adding and removing cost O(log length), whatever waits; a finished sequence is dropped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], Sequence]] = []
        self._num_finished = 0  # entries of sequences that finished while they waited
        self.num_swapped = 0
        self.num_tokens = 0  # of all waiting sequences: what they will hold once they run

    def __len__(self) -> int:
        return len(self._heap) - self._num_finished

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.order, sequence))
        self.count(sequence)

    def peek(self) -> Sequence | None:
        """The sequence that goes first."""
        while self._heap:
            sequence = self._heap[0][1]
            if not sequence.is_finished:
                return sequence
            heapq.heappop(self._heap)
            self._num_finished -= 1
        return None

    def pop(self) -> Sequence:
        """Removes the sequence that `peek` returned, while its state is still that of waiting."""
        _, sequence = heapq.heappop(self._heap)
        self.discount(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence is about to finish: call before its state changes."""
        self.discount(sequence)
        self._num_finished += 1
        if self._num_finished > _REBUILD_ABOVE and self._num_finished * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not (entry[1] is sequence or entry[1].is_finished)]
            heapq.heapify(self._heap)
            self._num_finished = 0

    def sequences(self) -> list[Sequence]:
        """All that wait, in no order."""
        return [sequence for _, sequence in self._heap if not sequence.is_finished]

    def count(self, sequence: Sequence) -> None:
        """Adds a waiting sequence to the figures; `discount` it before its state changes."""
        self.num_tokens += sequence.num_tokens
        self.num_swapped += sequence.state is SequenceState.SWAPPED

    def discount(self, sequence: Sequence) -> None:
        self.num_tokens -= sequence.num_tokens
        self.num_swapped -= sequence.state is SequenceState.SWAPPED
