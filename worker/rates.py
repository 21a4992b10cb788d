"""How fast this worker's engine is: measured, for the model card that ETAs and admission go by. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.stats import EngineStats
    from infra.contracts import ModelCard

_WORTH_TELLING = 0.05  # relative change


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second; None until measured."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None

    @classmethod
    def of_stats(cls, stats: EngineStats) -> Rates:
        return cls(stats.prefill_tokens_per_s, stats.decode_tokens_per_s)

    @classmethod
    def of_card(cls, card: ModelCard) -> Rates:
        return cls(card.prefill_tokens_per_s, card.decode_tokens_per_s)

    def over(self, older: Rates) -> Rates:
        """These, and the older ones where these are not measured yet."""
        return Rates(
            older.prefill_tokens_per_s if self.prefill_tokens_per_s is None else self.prefill_tokens_per_s,
            older.decode_tokens_per_s if self.decode_tokens_per_s is None else self.decode_tokens_per_s,
        )

    def differ_from(self, told: Rates) -> bool:
        """Whether they have moved enough to be told again."""
        return _differs(self.prefill_tokens_per_s, told.prefill_tokens_per_s) or _differs(
            self.decode_tokens_per_s, told.decode_tokens_per_s
        )


def _differs(now: float | None, told: float | None) -> bool:
    if now is None or told is None:
        return now is not None
    return abs(now - told) > _WORTH_TELLING * told
