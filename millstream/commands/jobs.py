"""`millstream jobs`"""

from __future__ import annotations

import sys
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter

from millstream.commands.connection import Connection, ConnectionFlags

if TYPE_CHECKING:
    from collections.abc import Iterable

    from api_gateway.schemas.jobs import JobView


def jobs(
    job_id: str | None = None,
    *,
    status: Literal["queued", "running", "succeeded", "failed", "cancelled", "expired"] | None = None,
    model: str | None = None,
    limit: int = 20,
    cancel: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    connection: ConnectionFlags = Connection(),  # noqa: B008
) -> int:
    """Lists jobs, newest first; with a job's id, shows that one.

    Parameters
    ----------
    job_id
        The job to show.
    status
        Only jobs in this state.
    model
        Only jobs of this model.
    limit
        Jobs to list at most.
    cancel
        Cancel the job named.
    json
        One JSON object a line.
    """
    from millstream.errors import UsageError

    if cancel and job_id is None:
        raise UsageError("--cancel needs the id of a job")
    if limit < 1:
        raise UsageError(f"--limit: is {limit}; give 1 or more")
    with connection.open() as client:
        if job_id is not None:
            handle = client.job(job_id)
            shown = [handle.cancel() if cancel else handle.get()]
        else:
            shown = list(islice(client.jobs(status=status, model=model, page_size=min(limit, 100)), limit))
    if json or job_id is not None:
        for job in shown:
            encoded = msgspec.json.encode(job)
            print((encoded if json else msgspec.json.format(encoded)).decode())
    else:
        _print_table(shown)
    return 0


def _print_table(shown: Iterable[JobView]) -> None:
    from datetime import datetime

    from rich.console import Console
    from rich.table import Table

    table = Table("job", "model", "status", "tier", "created", "seconds", "tokens", box=None, pad_edge=False)
    for job in shown:
        seconds = f"{job.finished_at - job.created_at:.1f}" if job.finished_at else ""
        tokens = f"{job.usage.prompt_tokens}+{job.usage.completion_tokens}" if job.usage else ""
        created = datetime.fromtimestamp(job.created_at).strftime("%m-%d %H:%M:%S")
        table.add_row(job.id, job.model, job.status, job.tier, created, seconds, tokens)
    width = None if sys.stdout.isatty() else 200  # whole ids where another program reads them
    Console(width=width).print(table)
