"""`millstream acl`"""

from __future__ import annotations

import secrets
import sys

from infra.access import ACCESS, acl_line, broker_line, user_of
from infra.addresses import ClusterAddress
from infra.settings import PipelineSettings, StoreSettings
from millstream.flags import from_environment


def acl(*, waitaof: bool = True) -> int:
    """Lines for the server's ACL file: a user for each process, with the keys and commands that it needs, and no more.

    As MILLSTREAM_REDIS_URL, MILLSTREAM_DURABILITY and MILLSTREAM_CELERY_URL say. The file goes to the standard output;
    the passwords, drawn anew each time, to the standard error: process, user, password.

    Parameters
    ----------
    waitaof
        Whether the server knows WAITAOF, which durability fsync asks for where it is there (not in Redis 7.0).
    """
    store, pipelines = from_environment(StoreSettings), from_environment(PipelineSettings)
    has_own_broker = pipelines.celery_url is not None
    in_cluster = ClusterAddress.parse(store.server_url) is not None
    passwords = {process: secrets.token_urlsafe(24) for process in (*ACCESS, "broker")}
    for process in ACCESS:
        line = acl_line(
            process,
            passwords[process],
            durability=store.durability,
            has_waitaof=waitaof,
            in_cluster=in_cluster,
            has_own_broker=has_own_broker,
        )
        print(line)
    if has_own_broker or in_cluster:
        print(f"millstream: the broker's server needs this line: {broker_line(passwords['broker'])}", file=sys.stderr)
    else:
        del passwords["broker"]
    for process, password in passwords.items():
        print(process, user_of(process), password, sep="\t", file=sys.stderr)
    return 0
