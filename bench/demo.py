"""`make demo`: real documents through every part, on an embedded server, with the real model.

Starts the whole stack in a temporary folder, summarizes the corpus as one run, shows the summaries as they are written,
checks what came out, stops everything, and checks that nothing is left. The last line is `demo ok: ...` or
`demo failed: ...`; the exit code is 0 or 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.weights.cache import cache_root
from infra.errors import MillstreamError
from infra.settings import StoreSettings, WorkerSettings
from millstream import Client, Stack
from millstream.errors import CommandError
from millstream.stack.settings import UpSettings
from millstream.summarize.documents import Document, read_documents
from millstream.summarize.follow import Follower
from millstream.summarize.progress import DocumentProgress, Listener
from millstream.summarize.session import Session, Totals

CORPUS = Path(__file__).parent / "corpus"
CHUNK_TOKENS = 768
TARGET_TOKENS = 48
DEADLINE_SECONDS = 600  # a run that takes longer has failed
_LINE_WIDTH = 88
_LOG_LINES = 60


class DemoFailed(Exception):
    """Something is not as it should be; the message says what, and what to do."""


class Lines(Listener):
    """Progress and growing summaries as whole lines, so that documents written at the same time stay apart."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self._names: dict[str, str] = {}
        self._written: dict[str, str] = {}  # pieces so far
        self._num_shown: dict[str, int] = {}  # characters of them
        self._counts: dict[str, str] = {}
        self._width = 0

    def opened(self, documents: Sequence[DocumentProgress]) -> None:
        self._names = {document.id: document.name for document in documents}
        self._width = max(map(len, self._names.values()), default=0)

    def changed(self, document: DocumentProgress) -> None:
        if document.num_chunks is None:
            return
        counts = f"[{document.num_chunks_done}/{document.num_chunks} chunks]"
        if counts != self._counts.get(document.id):
            self._counts[document.id] = counts
            self._say(document.id, counts)

    def piece(self, document_id: str, text: str) -> None:
        self.num_pieces += 1
        self._written[document_id] = (self._written.get(document_id, "") + text).lstrip()
        self._show(document_id, self._written[document_id], is_whole=False)

    def restarted(self, document_id: str) -> None:
        self._written[document_id], self._num_shown[document_id] = "", 0
        self._say(document_id, "[written anew]")

    def finished(self, document: DocumentProgress) -> None:
        if document.summary is None:
            self._say(document.id, f"[no summary] {document.error or document.status}")
        else:
            self._show(document.id, document.summary.strip(), is_whole=True)
        for failure in document.failures:
            self._say(document.id, f"[missing] {failure}")

    def noted(self, text: str) -> None:
        print(text, flush=True)

    def _show(self, document_id: str, text: str, *, is_whole: bool) -> None:
        """Says what of `text` has not been said yet, as lines; the last one only once it is full, or all is whole."""
        rest = " ".join(text[self._num_shown.get(document_id, 0) :].split("\n"))
        while len(rest) > _LINE_WIDTH and " " in rest[:_LINE_WIDTH]:
            line = rest[: rest.rindex(" ", 0, _LINE_WIDTH) + 1]
            self._say(document_id, line)
            rest = rest[len(line) :]
        if is_whole:
            self._say(document_id, rest)
            rest = ""
        self._num_shown[document_id] = len(text) - len(rest)

    def _say(self, document_id: str, text: str) -> None:
        if text.strip():
            print(f"{self._names[document_id]:>{self._width}} | {text.strip()}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="model of the worker; `fake` needs no weights")
    options = parser.parse_args(arguments)
    log: deque[str] = deque(maxlen=_LOG_LINES)
    try:
        line = run_demo(options.model, log)
        check_nothing_is_left()
    except KeyboardInterrupt:
        print("demo failed: it was interrupted; start it again with `make demo`")
        return 1
    except (DemoFailed, CommandError, MillstreamError, EngineError, OSError) as error:
        _show_log(log)
        print(f"demo failed: {' '.join(str(error).split())}")
        return 1
    except Exception as error:
        _show_log(log)
        traceback.print_exc()
        print(f"demo failed: {error!r}, which nobody foresaw; please report it with the lines above")
        return 1
    print(line)
    return 0


def run_demo(model: str, log: deque[str]) -> str:
    """Runs the stack and the summarization; returns the closing line. Raises DemoFailed and what the parts raise."""
    documents = read_corpus()
    print(f"demo: {len(documents)} documents from bench/corpus, model {model}", flush=True)
    with tempfile.TemporaryDirectory(prefix="millstream-demo-") as folder:
        stack = Stack(
            store=StoreSettings(cache_dir=cache_root()),
            worker=WorkerSettings(model=model),
            engine=EngineConfig(fake_seconds_per_step=0.01),  # so that the fake model writes at a speed one can watch
            up=UpSettings(data_dir=Path(folder)),
            log=lambda name, text: log.append(f"{name:>10} | {text}"),
        )
        began = time.monotonic()
        with stack, Client(stack.url) as client:
            print(f"demo: everything is up at {stack.url} after {time.monotonic() - began:.1f} s", flush=True)
            began = time.monotonic()
            session = Session(client, documents)
            session.start(
                lambda some: client.summarize(
                    some,
                    model=model,
                    target_tokens=TARGET_TOKENS,
                    chunk_tokens=CHUNK_TOKENS,
                    deadline=time.time() + DEADLINE_SECONDS,
                )
            )
            lines = Lines()
            ended = Follower(session.look, session.job, [lines], poll_seconds=0.1).follow()
            seconds = time.monotonic() - began
            totals = session.totals()
            check_outcome(documents, ended, totals, lines.num_pieces)
        num_summaries = sum(document.summary is not None for document in ended)
        return closing_line(num_summaries, totals, seconds)


def read_corpus() -> list[Document]:
    """The corpus's documents, under their files' names."""
    files = sorted(path for path in CORPUS.iterdir() if path.suffix in (".txt", ".md") and path.name != "README.md")
    return [
        replace(document, name=Path(document.name).name) for document in read_documents([str(one) for one in files])
    ]


def closing_line(num_documents: int, totals: Totals, seconds: float) -> str:
    return (
        f"demo ok: {num_documents} documents, {totals.num_chunks} chunks, {seconds:.1f} s, "
        f"{totals.num_tokens / seconds:.0f} tok/s, coverage {100 * (totals.coverage or 0.0):.1f}%"
    )


def check_outcome(
    documents: Sequence[Document], ended: Sequence[DocumentProgress], totals: Totals, num_pieces: int
) -> None:
    """Every document has a summary but the empty one, which says why; nothing is left out; summaries were streamed."""
    for given, document in zip(documents, ended, strict=True):
        if given.text == "" and (document.status != "failed" or "empty" not in (document.error or "")):
            raise DemoFailed(f"{document.name} is empty, but it ended as {document.status}: {document.error}")
        if given.text != "" and not (document.summary or "").strip():
            raise DemoFailed(f"{document.name} has no summary: {document.error or document.status}")
    if totals.coverage != 1.0:
        raise DemoFailed(f"only {totals.num_bytes_summarized} of {totals.num_bytes} bytes were summarized")
    if num_pieces < 2:
        raise DemoFailed(f"only {num_pieces} pieces of summaries were streamed; see the gateway's lines in the log")


def check_nothing_is_left() -> None:
    """No process that this one started lives on."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(") ")[2].split()[1])
            if parent == os.getpid():
                left.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip() or folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    if left:
        raise DemoFailed(f"still running: {'; '.join(left)}; end them, and report this")


def _show_log(log: deque[str]) -> None:
    for line in log:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
