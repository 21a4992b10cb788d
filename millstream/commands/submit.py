"""`millstream submit`"""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from millstream.commands.connection import Connection, ConnectionFlags
from millstream.errors import CommandError, UsageError


def submit(
    text: str | None = None,
    /,
    *,
    model: str | None = None,
    kind: Literal["generate", "chat"] = "generate",
    max_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    params: str | None = None,
    tier: Literal["interactive", "standard", "bulk"] = "standard",
    webhook: str | None = None,
    detach: Annotated[bool, Parameter(negative="")] = False,
    connection: ConnectionFlags = Connection(),  # noqa: B008
) -> int:
    """Submits a job and prints its text as it is generated.

    Parameters
    ----------
    text
        What to continue, or to answer as a user's message (--kind chat); read from standard input if left out.
    model
        The served model; may be left out where there is only one.
    max_tokens
        Tokens to generate at most.
    temperature
        0 takes the likeliest token each time.
    seed
        Same seed, same tokens.
    params
        Further sampling parameters as a JSON object.
    webhook
        A URL that is told the end.
    detach
        Print the job's id and do not wait.
    """
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = {**_object(params), **{name: value for name, value in given.items() if value is not None}}
    content = _standard_input() if text is None else text
    with connection.open() as client:
        job = client.submit(
            [{"role": "user", "content": content}] if kind == "chat" else content,
            model=model or connection.only_model(client),
            params=sampling,
            tier=tier,
            webhook={"url": webhook} if webhook else None,
        )
        print(job.id, file=sys.stdout if detach else sys.stderr, flush=True)
        if detach:
            return 0
        for piece in job.texts():
            sys.stdout.write(piece)
            sys.stdout.flush()
        print(flush=True)
        status = job.get().status
        if status != "succeeded":
            raise CommandError(f"{job.id} has {status}")
    return 0


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise UsageError("give a text, or pipe one in")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text: {error}") from error


def _object(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise UsageError(f"--params is no JSON object: {error}") from error
