"""`millstream summarize`"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from millstream.commands.connection import Connection, ConnectionFlags
from millstream.errors import UsageError

if TYPE_CHECKING:
    from millstream.summarize.progress import Listener

Flag = Annotated[bool, Parameter(negative="")]


def summarize(
    *files: str,
    model: str | None = None,
    style: Literal["abstract", "bullets", "headline"] = "abstract",
    template: str | None = None,
    target_tokens: int = 128,
    chunk_tokens: int | None = None,
    overlap_tokens: int = 0,
    fan_in: int = 8,
    language: str | None = None,
    tier: Literal["interactive", "standard", "bulk"] = "bulk",
    deadline: str | None = None,
    output: Path | None = None,
    json: Flag = False,
    local: Flag = False,
    connection: ConnectionFlags = Connection(),  # noqa: B008
) -> int:
    """Summarizes documents: each is split into chunks, the chunks are summarized through the queue, and their summaries
    joined. Summaries are shown as they are written; a bad document gets an error of its own. Exit code 1 if any
    document has no summary.

    Parameters
    ----------
    files
        Text files (.txt, .md, also .gz), .jsonl files of {"id", "text"} or {"id", "uri"} lines, file:// or s3://
        addresses that the pipelines can read.
    model
        The served model; may be left out where there is only one.
    template
        Own instruction in place of the style's, for example: "List the risks named in the text."
    target_tokens
        A summary's length at most, in the model's tokens.
    chunk_tokens
        A chunk's length at most, in the model's tokens.
    overlap_tokens
        How far a chunk reaches back into the one before.
    fan_in
        Summaries that are joined at a time.
    language
        Of the summaries; the text's own if left out.
    deadline
        Expires what has not finished by then (RFC 3339).
    output
        Write one JSON object a document to this file.
    json
        Print one JSON object a document instead of text.
    local
        Start everything for this call alone (with the settings in the environment), and stop it again.
    """
    from millstream.summarize.documents import read_documents
    from millstream.summarize.follow import Follower
    from millstream.summarize.plain_output import json_line
    from millstream.summarize.session import Session

    if not files:
        raise UsageError("name the files to summarize")
    if output is not None:
        _check_writable(output)
    documents = read_documents(files)
    with _gateway(connection, local, model) as gateway, gateway.open() as client:
        model = model or gateway.only_model(client)
        session = Session(client, documents)
        session.start(
            lambda some: client.summarize(
                some,
                model=model,
                style=style,
                template=template,
                target_tokens=target_tokens,
                chunk_tokens=chunk_tokens,
                overlap_tokens=overlap_tokens,
                fan_in=fan_in,
                language=language,
                tier=tier,
                deadline=deadline,
            )
        )
        listeners = _listeners(json)
        try:
            ended = Follower(session.look, session.job, listeners).follow()
        except KeyboardInterrupt:
            session.cancel()
            raise
        finally:
            for listener in listeners:
                listener.closed()
        totals = session.totals()
    if output is not None:
        output.write_text("".join(json_line(document) + "\n" for document in ended), encoding="utf-8")
    num_done = sum(document.summary is not None for document in ended)
    coverage = "" if totals.coverage is None else f", coverage {100 * totals.coverage:.1f}%"
    counts = f"{totals.num_chunks} chunks, {totals.num_tokens} tokens{coverage}"
    print(f"{num_done} of {len(ended)} documents summarized: {counts}", file=sys.stderr)
    return 0 if num_done == len(ended) else 1


def _check_writable(output: Path) -> None:
    """Better told before the work than after it."""
    folder = output.absolute().parent
    if output.is_dir() or not os.access(output if output.exists() else folder, os.W_OK):
        raise UsageError(f"--output: {output} cannot be written; name a file in a folder that is there")


@contextmanager
def _gateway(connection: Connection, local: bool, model: str | None) -> Iterator[Connection]:
    """The gateway to talk to: the one named, or one of our own for as long as this lasts."""
    if not local:
        yield connection
        return
    from millstream.stack.local import local_stack

    print("starting everything for this call", file=sys.stderr)
    with local_stack(model, log=lambda name, line: None) as stack:
        yield Connection(url=stack.url)


def _listeners(json: bool) -> list[Listener]:
    """Where progress and summaries go: bars to a terminal, lines to a file or a pipe."""
    from rich.console import Console

    from millstream.summarize.plain_output import JsonLines, PlainProgress, SummaryText
    from millstream.summarize.terminal_output import TerminalProgress

    if sys.stdout.isatty() and not json:
        return [TerminalProgress(Console(), with_summaries=True)]
    progress = TerminalProgress(Console(stderr=True), with_summaries=False) if sys.stderr.isatty() else None
    return [progress or PlainProgress(sys.stderr), JsonLines(sys.stdout) if json else SummaryText(sys.stdout)]
