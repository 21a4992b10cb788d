"""The tables that Python hands to Lua arrive there as they are, and say what the design says."""

from __future__ import annotations

import itertools

import pytest
import redis

from infra import endings, losses, states, tiers
from infra.contracts import Tier
from infra.scripts import LANE_SCRIPTS, OTHER_SCRIPTS, compose
from infra.settings import QueueSettings
from infra.states import TERMINAL, TRANSITIONS, Change, Status, after, change_to


def test_lua_has_the_same_transitions(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as server:
        for status, change in itertools.product(Status, Change):
            script = (
                states.as_lua() + "return {TRANSITIONS[ARGV[1] .. ':' .. ARGV[2]] or '', TERMINAL[ARGV[1]] and 1 or 0}"
            )
            target, is_end = server.eval(script, 0, str(status), str(change))
            assert target == (after(status, change) or "")
            assert bool(is_end) == (status in TERMINAL)


def test_ends_are_ends_and_all_can_be_reached() -> None:
    assert not any(status in TERMINAL for status, _ in TRANSITIONS)
    reached = {Status.QUEUED}
    for _ in Status:
        reached |= {target for (status, _), target in TRANSITIONS.items() if status in reached}
    assert reached == set(Status)
    assert {change_to(end) for end in TERMINAL} == set(Change) - {Change.CLAIM, Change.REQUEUE}
    for end in TERMINAL:
        assert after(Status.RUNNING, change_to(end)) is end
    with pytest.raises(ValueError, match="no end"):
        change_to(Status.QUEUED)


def test_lua_has_the_same_constants(redis_url: str) -> None:
    script = (
        tiers.as_lua()
        + losses.as_lua()
        + endings.as_lua()
        + "local strides = {} for i, tier in ipairs(TIERS) do strides[i] = STRIDES[tier] end\n"
        + "return {TIERS, strides, SUSPECT_STUCK_COUNT, MAX_STUCK_COUNT, MAX_LOST_COUNT, MAKE_ROOM_MS, "
        + "WORKER_LOST.code, WORKER_LOST.message, ATTEMPT_TIMEOUT.code, ATTEMPT_TIMEOUT.message}"
    )
    with redis.Redis.from_url(redis_url, decode_responses=True) as server:
        assert server.eval(script, 0) == [
            [str(tier) for tier in Tier], list(tiers.STRIDES.values()), 2, 3, 10, 5000,
            endings.WORKER_LOST.code, endings.WORKER_LOST.message,
            endings.ATTEMPT_TIMEOUT.code, endings.ATTEMPT_TIMEOUT.message,
        ]  # fmt: skip


def test_only_new_work_is_refused_when_memory_is_full() -> None:
    scripts = compose(QueueSettings())
    assert set(scripts) == {*LANE_SCRIPTS, *OTHER_SCRIPTS}
    refused = {name for name, text in scripts.items() if b"allow-oom" not in text.splitlines()[0]}
    assert refused == {"submit", "claim_key"}  # an index entry alone is no job, and its submit is refused beside it
