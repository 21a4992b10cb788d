"""`/internal`: for autoscalers and operators, not for the internet.

The scaling signal, like `/metrics`, tells whoever can reach this gateway how much work there is, and of whom nothing:
keep them inside the cluster. Pausing a lane needs an admin key.
"""

from __future__ import annotations

import msgspec
from litestar import get, post
from litestar.params import FromPath

from api_gateway import eta
from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of
from infra.errors import UnknownLane


class ScaleView(msgspec.Struct, kw_only=True):
    """What a pool of workers has before it."""

    backlog_seconds: float  # worker-seconds of work; zero only where nothing waits, runs, or is still to be fed
    queued: int  # waiting, delayed ones included
    delayed: int  # of those: to be tried again, and not yet
    running: int
    unfed: int  # items of runs that are not in the queue yet
    workers: int  # that live
    desired_workers: int  # that would work the backlog off in `scale_seconds_per_worker`
    lanes: list[int]


class LaneView(msgspec.Struct, kw_only=True):
    lane: int
    paused: bool


@get("/internal/scale/{alias:path}", responses=REFUSALS)
async def scale(alias: FromPath[str], request: AnyRequest) -> ScaleView:
    """The autoscaling signal of a model."""
    gateway, alias = gateway_of(request), alias.removeprefix("/")
    facts = await gateway.outlook.facts(alias, max_age_seconds=0.0)
    backlog_seconds = eta.backlog_seconds(facts)
    return ScaleView(
        backlog_seconds=round(backlog_seconds, 3),
        queued=facts.num_waiting,
        delayed=facts.num_delayed,
        running=facts.num_running,
        unfed=facts.num_unfed,
        workers=len(facts.workers),
        desired_workers=eta.desired_workers(facts, seconds_per_worker=gateway.settings.scale_seconds_per_worker),
        lanes=sorted(facts.loads),
    )


@post("/internal/lanes/{lane:int}/pause", status_code=200, responses=REFUSALS)
async def pause_lane(lane: FromPath[int], request: AnyRequest) -> LaneView:
    """Stops claiming in a lane. Submits go on, and what runs goes on."""
    return await _set_paused(request, lane, True)


@post("/internal/lanes/{lane:int}/resume", status_code=200, responses=REFUSALS)
async def resume_lane(lane: FromPath[int], request: AnyRequest) -> LaneView:
    """Starts claiming again."""
    return await _set_paused(request, lane, False)


async def _set_paused(request: AnyRequest, lane: int, paused: bool) -> LaneView:
    store = gateway_of(request).store
    lanes = await store.lanes()
    if lane not in lanes:
        raise UnknownLane(
            f"lane: there is no lane {lane}; there are {', '.join(map(str, lanes)) or 'none'}", param="lane"
        )
    await store.set_paused(lane, paused)
    return LaneView(lane=lane, paused=paused)
