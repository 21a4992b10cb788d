"""`/internal`: for autoscalers and operators, not for the internet."""

from __future__ import annotations

import msgspec
from litestar import get, post
from litestar.params import FromPath

from api_gateway.metrics import backlog_seconds
from api_gateway.routes.context import REFUSALS, AnyRequest, gateway_of
from infra.errors import MillstreamError


class UnknownLane(MillstreamError):
    """There is no lane of that number."""

    status = 404
    code = "lane_not_found"


class ScaleView(msgspec.Struct, kw_only=True):
    """What a pool of workers has before it. Null: not known here."""

    backlog_seconds: float  # worker-seconds of work; zero only where nothing waits and nothing runs
    queued: int  # waiting, delayed ones included
    delayed: int | None
    running: int
    unfed: int | None  # work of runs that is not in the queue yet
    workers: int | None
    desired_workers: int | None


class LaneView(msgspec.Struct, kw_only=True):
    lane: int
    paused: bool


@get("/internal/scale/{alias:path}", responses=REFUSALS)
async def scale(alias: FromPath[str], request: AnyRequest) -> ScaleView:
    """The autoscaling signal of a model."""
    gateway, alias = gateway_of(request), alias.removeprefix("/")
    await gateway.cards.get(alias)
    loads = [await gateway.store.load(lane) for lane in await gateway.store.lanes(alias)]
    return ScaleView(
        backlog_seconds=round(backlog_seconds(loads, gateway.cards, alias), 3),
        queued=sum(sum(load.waiting.values()) for load in loads),
        delayed=None,
        running=sum(load.running for load in loads),
        unfed=None,
        workers=None,
        desired_workers=None,
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
