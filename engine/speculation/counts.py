"""What speculation has come to since the engine's start. Pure."""

from __future__ import annotations


class SpeculationCounts:
    def __init__(self, most: int) -> None:
        """`most`: proposals of one row."""
        self.num_rows = 0  # that verified proposals
        self.num_drawn = 0  # tokens that came of these rows, each row's own included
        self.drafted_at = [0] * most  # proposals verified, by their place in a row
        self.accepted_at = [0] * most

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def acceptance_by_position(self) -> tuple[float | None, ...]:
        """Share of the proposals at each place that were accepted; None where none was verified."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=True)
        return tuple(accepted / drafted if drafted else None for accepted, drafted in pairs)

    def add(self, *, num_drafted: int, num_accepted: int, num_drawn: int) -> None:
        """One row's."""
        self.num_rows += 1
        self.num_drawn += num_drawn
        for place in range(num_drafted):
            self.drafted_at[place] += 1
            self.accepted_at[place] += place < num_accepted
