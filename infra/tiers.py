"""Which tier's head goes next: by weight (8 : 4 : 1), then by age. Pure; `lua/claim.lua` repeats `choose` line by line.

Stride scheduling: serving a tier adds its stride to its pass, and the lowest pass goes next. `clock` is the pass served
last; a tier that was empty starts from there, so that idling saves up no credit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from infra.contracts import Tier

STRIDES: dict[Tier, int] = {Tier.INTERACTIVE: 1, Tier.STANDARD: 2, Tier.BULK: 8}  # 8 / weight


@dataclass(frozen=True, slots=True)
class Head:
    """The first waiting job of a tier."""

    arrived_ms: int
    fits: bool


@dataclass(slots=True)
class Service:
    """What a lane remembers of the service its tiers got."""

    clock: int = 0
    passes: dict[Tier, int] = field(default_factory=dict)
    served_ms: dict[Tier, int] = field(default_factory=dict)

    def standing_ms(self, tier: Tier, head: Head, now_ms: int) -> int:
        """How long the head has been at the front: since it came, or since the tier was last served."""
        return now_ms - max(head.arrived_ms, self.served_ms.get(tier, 0))

    def choose(self, heads: Mapping[Tier, Head], *, now_ms: int, patience_ms: int) -> Tier | None:
        """The tier to serve, or None. A head that stood past its patience goes first, or holds up all until it fits.

        Patience is longer for lower tiers, by their strides, so that slow service does not level the weights.
        """
        ages = {tier: self.standing_ms(tier, head, now_ms) / STRIDES[tier] for tier, head in heads.items()}
        overdue = [tier for tier in STRIDES if tier in heads and ages[tier] >= patience_ms]
        if overdue:
            oldest = max(overdue, key=ages.__getitem__)  # the first of STRIDES among equals
            return oldest if heads[oldest].fits else None
        fitting = [tier for tier in STRIDES if tier in heads and heads[tier].fits]
        return min(fitting, key=lambda tier: (self._pass(tier), heads[tier].arrived_ms), default=None)

    def serve(self, tier: Tier, now_ms: int) -> None:
        self.clock = self._pass(tier)
        self.passes[tier] = self.clock + STRIDES[tier]
        self.served_ms[tier] = now_ms

    def _pass(self, tier: Tier) -> int:
        return max(self.passes.get(tier, 0), self.clock)


def as_lua() -> str:
    """The tiers in order and their strides as Lua literals."""
    names = ", ".join(f'"{tier}"' for tier in STRIDES)
    strides = ", ".join(f'["{tier}"]={stride}' for tier, stride in STRIDES.items())
    return f"local TIERS = {{{names}}}\nlocal STRIDES = {{{strides}}}\n"
