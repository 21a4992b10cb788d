"""What a scenario found: counts that must be zero, figures that are worth reading, and why a promise failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Record(msgspec.Struct, kw_only=True):
    """One promise under one fault. A promise is kept where all counts are zero and `broken` is empty."""

    promise: str
    fault: str
    jobs: int = 0  # accepted, and followed to their end
    lost: int = 0  # accepted, and without the outcome they should have had
    duplicates: int = 0  # second outcomes, repeated numbers, repeated tokens
    gaps: int = 0  # missing numbers, missing tokens
    leaked_blocks: int = 0  # KV blocks held by idle workers
    figures: dict[str, float | int | str] = {}
    broken: list[str] = []  # what else is not as promised
    seconds: float = 0.0

    def demand(self, holds: object, complaint: str) -> None:
        """Notes `complaint` unless `holds`."""
        if not holds:
            self.broken.append(complaint)

    @property
    def is_kept(self) -> bool:
        return not (self.lost or self.duplicates or self.gaps or self.leaked_blocks or self.broken)


def summary(records: dict[str, Record]) -> dict[str, Any]:
    """The last line of a run. `records`: by scenario."""
    counts = ("jobs", "lost", "duplicates", "gaps", "leaked_blocks")
    totals: dict[str, Any] = {name: sum(getattr(record, name) for record in records.values()) for name in counts}
    return totals | {"failed_promises": [name for name, record in records.items() if not record.is_kept]}


def table(records: dict[str, Record]) -> str:
    """Markdown, one line a scenario."""
    lines = ["| scenario | promise | fault | record | kept |", "|---|---|---|---|---|"]
    for name, record in records.items():
        shown: Sequence[str] = [
            f"{record.jobs} jobs",
            f"lost = {record.lost}, duplicates = {record.duplicates}, gaps = {record.gaps}",
            *(f"{label} = {value}" for label, value in record.figures.items()),
            *record.broken,
        ]
        kept = "yes" if record.is_kept else "NO"
        lines.append(f"| {name} | {record.promise} | {record.fault} | {'; '.join(shown)} | {kept} |")
    return "\n".join(lines)
