"""The rule by which proposals become output. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.plan import Sampled


def num_accepted(proposals: list[int], samples: list[Sampled]) -> int:
    """How many of a row's proposals are output.

    One forward computes the newest token and all proposals; the target then names a token at each place, as if the
    proposals before that place were output:

        place        0            1            ...    K
        computed     newest       proposal 0   ...    proposal K-1
        target       token 0      token 1      ...    token K

    A proposal is accepted iff it is the token that the target names at its place, and all before it are accepted.
    Output then goes on with target tokens 0 .. num_accepted, the last of which is the target's own: every token is the
    target's. What the target names depends on the verification:

        coupled     the token it would draw without any proposal, with the noise of that place: output never changes
        rejection   the proposal with probability min(1, p / q), else a draw from max(0, p - q): output keeps its
                    distribution (and such a draw is never the proposal)

    `samples`: of places 0 .. K; a place where the draw failed names no token.
    """
    count = 0
    for proposal, sampled in zip(proposals, samples, strict=False):
        if sampled.token_id != proposal:
            break
        count += 1
    return count
