"""The servers of a Cluster: which of them has a key's slot, and what to do where that has changed.

    slot of the key ──> server ──> answer
                          │ MOVED: nothing was done; note where the slot is now, ask there
                          │ ASK: this one key has moved already; ask there, this once
                          │ TRYAGAIN: the keys are apart while their slot moves; a little later, or not now
                          │ CLUSTERDOWN, connection lost: read the map anew before the next command

Nothing is repeated but what a server has refused to do. Why not redis-py's own: docs/decisions/0013.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from infra.addresses import ClusterAddress, Host
from infra.node import Argument, Command, Node, is_lost

MAX_REDIRECTS = 8
TRY_AGAIN_SECONDS = 0.05
LOOK_SECONDS = 1.0  # one server's time to say where the slots are
LEAST_SECONDS_BETWEEN_LOOKS = 0.1

_KEYLESS = frozenset(
    ("INFO", "COMMAND", "CONFIG", "SCRIPT", "TIME", "WAIT", "WAITAOF", "CLUSTER", "PING", "ACL", "DBSIZE")
)


def key_of(command: Command) -> Argument | None:
    """The first key that a command names; None for one about its server. All keys of a command share a slot."""
    name = str(command[0]).partition(" ")[0].upper()
    if name in _KEYLESS:
        return None
    if name in ("EVAL", "EVALSHA"):
        return command[3] if int(command[2]) else None
    if name == "XREAD":
        return command[[str(part).upper() for part in command].index("STREAMS") + 1]
    return command[1]


def slot_of(key: Argument) -> int:
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


class Cluster:
    """Commands find their server by their key; those without one go to the server of `near`, a key."""

    def __init__(self, address: ClusterAddress, *, max_connections: int, timeout_seconds: float) -> None:
        """Connects to nothing. The limits are each server's."""
        self._address = address
        self._max_connections = max_connections
        self._timeout_seconds = timeout_seconds
        self._nodes: dict[Host, Node] = {}
        self._hosts: list[Host | None] = [None] * REDIS_CLUSTER_HASH_SLOTS  # slot -> its primary
        self._is_stale = True
        self._lost: Host | None = None  # the server that did not answer last
        self._looked_at = -LEAST_SECONDS_BETWEEN_LOOKS
        self._looking = asyncio.Lock()

    async def one(self, command: Command, *, near: Argument | None = None) -> Any:
        """One command's answer. Raises redis errors as they are."""
        [answer] = await self._redirected([command], self._slot_for([command], near))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def several(self, commands: Sequence[Command], *, near: Argument | None = None) -> list[Any]:
        """The answers in order; errors of single ones are among them.

        Commands that belong together (one without a key is among them) go to one server on one connection, in one
        slot; all others where their keys are, side by side.
        """
        if not commands:
            return []
        if any(key_of(command) is None for command in commands):
            slot = self._slot_for(commands, near)
            return await self._redirected(commands, slot, are_one=True)
        by_slot = defaultdict[int, list[int]](list)
        for index, command in enumerate(commands):
            by_slot[self._slot_for([command], None)].append(index)
        found = await asyncio.gather(
            *(self._redirected([commands[index] for index in indexes], slot) for slot, indexes in by_slot.items())
        )
        in_order = [None] * len(commands)
        for indexes, answers in zip(by_slot.values(), found, strict=True):
            for index, answer in zip(indexes, answers, strict=True):
                in_order[index] = answer
        return in_order

    async def everywhere(self, command: Command) -> list[Any]:
        """The answers of all primaries. Raises the first error."""
        await self._look_where_stale()
        primaries = sorted({host for host in self._hosts if host is not None})
        return await asyncio.gather(*(self._node(host).one(command) for host in primaries))

    async def close(self) -> None:
        nodes, self._nodes = list(self._nodes.values()), {}
        for node in nodes:
            await node.close()

    # --- one slot ---

    def _slot_for(self, commands: Sequence[Command], near: Argument | None) -> int:
        """The slot of all of them. Raises ValueError where there are several, or none: a fault of the caller."""
        keys = [near, *(key_of(command) for command in commands)]
        slots = {slot_of(key) for key in keys if key is not None}
        if len(slots) != 1:
            raise ValueError(f"{[str(command[0]) for command in commands]} touch {len(slots)} slots, not one")
        return slots.pop()

    async def _redirected(self, commands: Sequence[Command], slot: int, *, are_one: bool = False) -> list[Any]:
        """The answers of the server that has the slot now. Where it has turned all away, nothing was done: ask on.

        `are_one`: of commands that prove something together, some cannot be asked again alone.
        """
        await self._look_where_stale()
        host, is_asking = self._hosts[slot], False
        num_keyed = sum(key_of(command) is not None for command in commands)
        for _ in range(MAX_REDIRECTS):
            if host is None:
                self._is_stale = True
                raise ClusterDownError(f"no server has slot {slot}")
            answers = await self._answers(host, commands, is_asking=is_asking)
            refused = [index for index, command in enumerate(commands) if _is_refusal(answers[index], command)]
            if not refused:
                return answers
            if len(refused) < num_keyed and not are_one:
                for index in refused:
                    [answers[index]] = await self._redirected([commands[index]], slot)
                return answers
            refusal = answers[refused[0]]
            if len(refused) < num_keyed:
                break
            is_asking = False
            if isinstance(refusal, MovedError):
                host = self._hosts[slot] = (refusal.host or host[0], refusal.port)
                self._is_stale = True  # others may have moved with it
            elif isinstance(refusal, AskError):
                host, is_asking = (refusal.host or host[0], refusal.port), True
            else:
                await asyncio.sleep(TRY_AGAIN_SECONDS)
                host = self._hosts[slot]
        return [TryAgainError("the slot of these keys is being moved to another server")] * len(commands)

    async def _answers(self, host: Host, commands: Sequence[Command], *, is_asking: bool) -> list[Any]:
        node = self._node(host)
        try:
            if is_asking:
                answers = await node.asking(commands)
            elif len(commands) == 1:
                answers = [await _caught(node, commands[0])]
            else:
                answers = await node.several(commands)
        except BaseException as error:
            if is_lost(error):
                self._is_stale, self._lost = True, host
            raise
        if any(isinstance(answer, (ClusterDownError, redis.exceptions.ReadOnlyError)) for answer in answers):
            self._is_stale = True
        return answers

    # --- the map ---

    def _node(self, host: Host) -> Node:
        node = self._nodes.get(host)
        if node is None:
            node = self._nodes[host] = Node(
                self._address.url_of(host),
                max_connections=self._max_connections,
                timeout_seconds=self._timeout_seconds,
            )
        return node

    async def _look_where_stale(self) -> None:
        """Reads the map anew where something has told that it is old, but not again and again."""
        if not self._is_stale:
            return
        async with self._looking:
            clock = asyncio.get_running_loop().time
            if self._is_stale and clock() - self._looked_at >= LEAST_SECONDS_BETWEEN_LOOKS:
                await self._look()
                self._looked_at = clock()

    async def _look(self) -> None:
        """Asks one server after the other where the slots are, until one says. Raises the last one's error."""
        known = list({*self._nodes, *self._address.hosts})
        random.shuffle(known)
        failure: Exception = redis.exceptions.ConnectionError("no server of the Cluster is known")
        for host in sorted(known, key=lambda host: host == self._lost):
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    ranges = await self._node(host).one(("CLUSTER SLOTS",))
            except (redis.exceptions.RedisError, OSError, TimeoutError) as error:
                failure = error if isinstance(error, redis.exceptions.RedisError) else _no_answer(host, error)
            else:
                return await self._take(ranges, asked=host)
        raise failure

    async def _take(self, ranges: Sequence[Any], *, asked: Host) -> None:
        hosts: list[Host | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        told = set[Host]()
        for first, last, *servers in ranges:
            # A server that tells no name is meant by the name that we reached the asked one by.
            names = [(_text(name) or asked[0], port) for name, port, *_ in servers]
            told.update(names)
            hosts[first : last + 1] = [names[0]] * (last + 1 - first)
        self._hosts, self._is_stale = hosts, False
        for host in [host for host in self._nodes if host not in told]:
            self._nodes.pop(host).let_go()


async def _caught(node: Node, command: Command) -> Any:
    try:
        return await node.one(command)
    except redis.exceptions.ResponseError as error:
        return error


def _is_refusal(answer: Any, command: Command) -> bool:
    """Whether a server did not do this because the key is, or is going, elsewhere."""
    return isinstance(answer, (MovedError, AskError, TryAgainError)) and key_of(command) is not None


def _text(name: Any) -> str:
    text = name.decode() if isinstance(name, bytes) else str(name or "")
    return "" if text == "?" else text


def _no_answer(host: Host, error: Exception) -> redis.exceptions.ConnectionError:
    return redis.exceptions.ConnectionError(f"{host[0]}:{host[1]} does not answer: {error or type(error).__name__}")
