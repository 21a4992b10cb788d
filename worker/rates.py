"""How fast this worker's engine is: measured, for the model card that ETAs and admission go by. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.contracts import ModelCard, Pace

if TYPE_CHECKING:
    from engine.stats import EngineStats

_WORTH_TELLING = 0.05  # relative change


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second; None until measured."""

    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    pace: Pace | None = None

    @classmethod
    def of_stats(cls, stats: EngineStats, pace: Pace | None = None) -> Rates:
        return cls(stats.prefill_tokens_per_s, stats.decode_tokens_per_s, pace)

    @classmethod
    def of_card(cls, card: ModelCard) -> Rates:
        return cls(card.prefill_tokens_per_s, card.decode_tokens_per_s, card.pace)

    def over(self, older: Rates) -> Rates:
        """These, and the older ones where these are not measured yet."""
        return Rates(
            older.prefill_tokens_per_s if self.prefill_tokens_per_s is None else self.prefill_tokens_per_s,
            older.decode_tokens_per_s if self.decode_tokens_per_s is None else self.decode_tokens_per_s,
            self.pace or older.pace,
        )

    def differ_from(self, told: Rates) -> bool:
        """Whether they have moved enough to be told again."""
        return (
            _differs(self.prefill_tokens_per_s, told.prefill_tokens_per_s)
            or _differs(self.decode_tokens_per_s, told.decode_tokens_per_s)
            or any(map(_differs, _figures(self.pace), _figures(told.pace)))
        )


def _figures(pace: Pace | None) -> tuple[float | None, ...]:
    if pace is None:
        return None, None, None
    return pace.seconds_per_step, pace.seconds_per_output_token, pace.seconds_per_prompt_token


def _differs(now: float | None, told: float | None) -> bool:
    if now is None or told is None:
        return now is not None
    return abs(now - told) > _WORTH_TELLING * told
