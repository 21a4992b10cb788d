"""What each process may do on the server: one table, and the lines of an ACL file that follow from it. Pure.

A process gets the keys it touches and the commands it sends, those of its scripts read from their sources: a server
checks every call of a script against the rights of whoever called it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from infra.runs import scripts as run_scripts
from infra.scripts import compose
from infra.settings import QueueSettings

Durability = Literal["fast", "fsync", "replicated"]

_CALL = re.compile(r"redis\.p?call\(\s*'([A-Z]+)'(?:, '([A-Z]+)')?")
_CONTAINERS = frozenset(("XINFO", "XGROUP"))  # commands whose subcommands are granted one by one

# Key patterns: `~` to read and write, `%R~` to read.
_LANE_KEYS = "~ms:{[0-9]*}:*"
_REGISTRY = ("~ms:lanes", "~ms:{ms:lanes}:closed")
_RUN_KEYS = ("~ms:{run-*}:*", "~ms:runs:due")
_BROKER_KEYS = "~ms:celery:*"
_INDEX_KEYS = "~ms:tenant:*"

# What Celery's broker asks for, with the options that `worker.runs.app` sets.
_BROKER_COMMANDS = (
    "brpop", "del", "evalsha", "exec", "get", "hdel", "hget", "hset", "llen", "lpush", "multi", "ping", "rpush",
    "sadd", "set", "smembers", "srem", "unwatch", "watch", "zadd", "zrem", "zrevrangebyscore",
)  # fmt: skip
_CONNECTION = ("command|info", "info", "select", "eval", "evalsha", "script|load")
_READS_A_JOB = ("hgetall", "hget", "xrange", "exists", "set")  # `set`: the mark of what is proven to be kept


@dataclass(frozen=True, slots=True)
class Access:
    """What one process needs."""

    keys: tuple[str, ...]
    commands: tuple[str, ...]  # that it sends itself, beside those of every connection
    scripts: tuple[str, ...] = ()  # of `infra.scripts`
    run_scripts: tuple[str, ...] = ()  # of `infra.runs.scripts`
    uses_broker: bool = False  # while that is the same server


ACCESS: dict[str, Access] = {
    "gateway": Access(
        keys=(_LANE_KEYS, *_REGISTRY, *_RUN_KEYS, _INDEX_KEYS,
              "%R~ms:cards", "~ms:{workers:*}", "~ms:idem:*", "~ms:ping"),
        commands=(*_READS_A_JOB, "hmget", "scard", "xinfo|stream", "xread", "zrange", "zrem", "zrevrange", "zrevrank"),
        scripts=("submit", "cancel", "delete", "sweep", "position", "pause", "load", "look", "read_logs", "watch",
                 "drop", "open_lane", "revive_lane", "forget_lane", "claim_key", "index_job", "prune_index", "workers"),
        run_scripts=("CREATE", "FINISH", "READ", "WAKE"),
    ),
    "worker": Access(
        keys=(_LANE_KEYS, *_REGISTRY, "~ms:cards", "~ms:{workers:*}"),
        commands=(*_READS_A_JOB, "hdel", "hset", "time", "xinfo|stream", "xread", "zrangebyscore"),
        scripts=("claim", "renew", "publish", "commit", "release", "open_lane", "put_worker"),
    ),
    "dispatcher": Access(
        keys=(_LANE_KEYS, *_REGISTRY, *_RUN_KEYS, "~ms:webhooks:*", "~ms:webhook:*"),
        commands=(*_READS_A_JOB, "expire", "get", "hincrby", "hset", "setnx", "smembers", "zadd", "zrem",
                  "zremrangebyscore"),
        scripts=("sweep", "cancel", "take_notices", "delay_notice", "delete_notice", "drop", "forget_lane"),
        run_scripts=("TAKE_DUE", "DELAY", "WAKE"),
        uses_broker=True,
    ),
    "pipelines": Access(
        keys=(_LANE_KEYS, *_REGISTRY, *_RUN_KEYS, _INDEX_KEYS, "%R~ms:cards"),
        commands=(*_READS_A_JOB, "hmget", "smembers", "srem", "time", "zrange", "zrem"),
        scripts=("submit", "index_job", "open_lane", "revive_lane", "cancel", "delete_notice"),
        run_scripts=("UPDATE", "FINISH", "READ", "READ_FIELDS", "WAKE"),
        uses_broker=True,
    ),
    "operator": Access(
        keys=(_LANE_KEYS, *_REGISTRY, _INDEX_KEYS, "~ms:webhooks:*"),
        commands=(*_READS_A_JOB, "get", "setnx", "zrem", "zrevrange"),
        scripts=("submit", "index_job", "open_lane", "revive_lane", "load", "pause",
                 "add_lane", "close_lane", "reopen_lane"),
    ),
}  # fmt: skip


def user_of(process: str) -> str:
    return f"millstream-{process}"


def commands_of(
    access: Access, *, durability: Durability = "fast", has_waitaof: bool = True, in_cluster: bool = False,
    has_own_broker: bool = False,
) -> list[str]:  # fmt: skip
    """All commands that a process needs, subcommands as `name|subcommand`, sorted."""
    texts = compose(QueueSettings())
    sources = [texts[name].decode() for name in access.scripts]
    sources += [getattr(run_scripts, name) for name in access.run_scripts]
    found = {*_CONNECTION, *access.commands, *_called_by(sources)}
    if access.uses_broker and not (has_own_broker or in_cluster):
        found.update(_BROKER_COMMANDS)
    if durability == "replicated":
        found.add("wait")
    if durability == "fsync":
        found.update(("config|get", "waitaof") if has_waitaof else ("config|get",))
    if in_cluster:
        found.update(("cluster|slots", "asking"))
        found.discard("select")
    return sorted(found)


def acl_line(
    process: str, password: str, *, durability: Durability = "fast", has_waitaof: bool = True, in_cluster: bool = False,
    has_own_broker: bool = False,
) -> str:  # fmt: skip
    """A process's line of an ACL file; the password only as its digest."""
    access = ACCESS[process]
    keys = [*access.keys]
    if access.uses_broker and not (has_own_broker or in_cluster):
        keys.append(_BROKER_KEYS)
    commands = commands_of(
        access, durability=durability, has_waitaof=has_waitaof, in_cluster=in_cluster, has_own_broker=has_own_broker
    )
    digest = sha256(password.encode()).hexdigest()
    rights = " ".join([*keys, "-@all", *(f"+{command}" for command in commands)])
    return f"user {user_of(process)} on #{digest} resetchannels {rights}"


def broker_line(password: str) -> str:
    """The line of a user of a broker of its own: dispatcher and pipelines share it."""
    digest = sha256(password.encode()).hexdigest()
    rights = " ".join(f"+{command}" for command in sorted({*_BROKER_COMMANDS, "info", "select"}))
    return f"user {user_of('broker')} on #{digest} resetchannels {_BROKER_KEYS} -@all {rights}"


def _called_by(sources: Iterable[str]) -> set[str]:
    """Names of the commands that scripts call."""
    calls = {call for source in sources for call in _CALL.findall(source)}
    return {f"{name}|{sub}".lower() if name in _CONTAINERS else name.lower() for name, sub in calls}
