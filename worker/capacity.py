"""How much more this worker may claim: what its engine can run now, nothing to be kept for later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from worker.attempt import Attempt, Phase

if TYPE_CHECKING:
    from engine.stats import EngineStats


def free_tokens(stats: EngineStats, attempts: Iterable[Attempt]) -> int | None:
    """KV tokens to claim a job for; 0 while none may be claimed, None for an idle worker, which may take any.

    The engine's figure counts what it has accepted; of the attempts on their way to it, the whole cost counts as taken.
    """
    unseen_tokens = num_sequences = 0
    for attempt in attempts:
        if attempt.phase in (Phase.STARTING, Phase.RUNNING, Phase.LEAVING):
            num_sequences += attempt.num_sequences
            unseen_tokens += 0 if attempt.is_accepted else attempt.job.cost_tokens
    if num_sequences == 0:
        return None
    if num_sequences >= stats.max_num_seqs:
        return 0
    return max(0, stats.free_tokens - unseen_tokens)
