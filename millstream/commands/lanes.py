"""`millstream lanes`"""

from __future__ import annotations

import asyncio
from typing import Literal

from infra.errors import UnknownLane
from infra.jobs import RedisJobs
from infra.settings import StoreSettings
from infra.store import JobStore
from millstream.errors import UsageError
from millstream.flags import from_environment
from millstream.stack.address import joining

Action = Literal["list", "add", "close", "open", "pause", "resume"]


def lanes(action: Action = "list", which: str = "", /) -> int:
    """Lanes of the queue, each a shard of one model's: lists them, or changes them.

    New jobs go to a model's open lanes, each as likely. A closed lane is worked off, then dropped; a paused one takes
    jobs, and none is started.

    Parameters
    ----------
    action
        What to do.
    which
        For `add` the model's alias, for all else but `list` the lane's number.
    """
    if (action == "list") == bool(which):
        raise UsageError("list takes nothing, add a model's alias; close, open, pause and resume take a lane's number")
    if action not in ("list", "add") and not which.isdecimal():
        raise UsageError(f"{which[:80]!r} is no lane's number; `millstream lanes` lists them")
    return asyncio.run(_serve(action, which))


async def _serve(action: Action, which: str) -> int:
    settings = joining(from_environment(StoreSettings))
    store = await RedisJobs.connect(settings.server_url, kept=settings)
    try:
        match action:
            case "list":
                await _list(store)
            case "add":
                print(await store.add_lane(which))
            case "close" | "open":
                await store.set_open(int(which), action == "open")
            case "pause" | "resume":
                if int(which) not in await store.lanes():
                    raise UnknownLane(f"there is no lane {which}; see `millstream lanes`")
                await store.set_paused(int(which), action == "pause")
        return 0
    finally:
        await store.close()


async def _list(store: JobStore) -> None:
    for lane in await store.lane_states():
        load = await store.load(lane.number)
        state = ["open" if lane.is_open else "closed", *(["paused"] if load.paused else [])]
        print(
            lane.number,
            lane.alias,
            ",".join(state),
            f"waiting={load.num_waiting}",
            f"running={load.running}",
            f"dead={len(await store.dead_letters(lane.number))}",
            sep="\t",
        )
