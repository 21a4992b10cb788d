"""Computes which tokens may come next while the model computes how likely they are."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from concurrent.futures import Future, ThreadPoolExecutor

from engine.sequence import Sequence


class LookAhead:
    """One thread beside the forward pass, which holds no interpreter lock; started for the first guided sequence."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, sequences: Listed[Sequence]) -> Future[None] | None:
        """For sequences that draw from the forward about to begin. Wait for the future before they do."""
        guided = [sequence for sequence in sequences if sequence.matcher is not None]
        if not guided:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        return self._thread.submit(_look, guided)


def _look(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.matcher is not None:
            sequence.matcher.allowed_after(sequence.output_token_ids)
