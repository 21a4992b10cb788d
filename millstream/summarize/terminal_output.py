"""Output on a terminal: a bar for each document that is worked on, its summary's tail as it grows, then the whole."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from millstream.summarize.progress import DocumentProgress, Listener

_MAX_BARS = 12  # more than a screen would show
# What a terminal would obey instead of showing; a model or a file's name may hold anything.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}
_NAME_WIDTH = 26
_BAR_WIDTH = 16
_CHUNKS_WIDTH = 14


class TerminalProgress(Listener):
    """Bars at the bottom of the terminal; finished documents are printed above, once each, in the order they end."""

    def __init__(self, console: Console, *, with_summaries: bool) -> None:
        self._console = console
        self._with_summaries = with_summaries
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.fields[chunks]}"),
            TextColumn("{task.fields[tail]}", style="dim"),
            console=console,
        )
        self._tail_width = max(console.width - _NAME_WIDTH - _BAR_WIDTH - _CHUNKS_WIDTH - 4, 0)  # 4: gaps
        self._bars: dict[str, TaskID] = {}
        self._tails: dict[str, str] = {}
        self._all: TaskID | None = None
        self._num_documents = 0
        self._num_done = 0

    def opened(self, documents: Sequence[DocumentProgress]) -> None:
        self._num_documents = len(documents)
        self._all = self._progress.add_task("documents", total=len(documents), chunks="", tail="")
        self._progress.start()

    def changed(self, document: DocumentProgress) -> None:
        bar = self._bars.get(document.id)
        if bar is None:
            if len(self._bars) >= _MAX_BARS:
                return
            name = _shortened(document.name)
            bar = self._bars[document.id] = self._progress.add_task(name, total=None, chunks="", tail="")
        if document.num_chunks is not None:
            done = document.num_chunks_done + document.num_chunks_failed
            self._progress.update(
                bar, total=document.num_chunks, completed=done, chunks=f"{done}/{document.num_chunks} chunks"
            )

    def piece(self, document_id: str, text: str) -> None:
        self._tails[document_id] = (self._tails.get(document_id, "") + text)[-4 * self._tail_width - 1 :]
        self._show_tail(document_id)

    def restarted(self, document_id: str) -> None:
        self._tails[document_id] = ""
        self._show_tail(document_id)

    def finished(self, document: DocumentProgress) -> None:
        bar = self._bars.pop(document.id, None)
        if bar is not None:
            self._progress.remove_task(bar)
        if self._all is not None:
            self._num_done += 1
            self._progress.update(self._all, completed=self._num_done, chunks=f"{self._num_done}/{self._num_documents}")
        if self._with_summaries:
            self._show_document(document)

    def noted(self, text: str) -> None:
        self._print(text, style="yellow")

    def closed(self) -> None:
        self._progress.stop()

    def _show_tail(self, document_id: str) -> None:
        bar = self._bars.get(document_id)
        if bar is not None:
            tail = " ".join(self._tails[document_id].split()).translate(_CONTROLS)
            shown = tail[len(tail) - self._tail_width :] if len(tail) > self._tail_width else tail
            self._progress.update(bar, tail=shown.replace("[", "\\["))

    def _show_document(self, document: DocumentProgress) -> None:
        self._print(document.name, style="bold")
        if document.summary is not None:
            self._print(document.summary.strip())
        else:
            self._print(f"error: {document.error or document.status}", style="red")
        for failure in document.failures:
            self._print(failure, style="yellow")
        self._console.print()

    def _print(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(text.translate(_CONTROLS), style=style))


def _shortened(name: str) -> str:
    """The end of a long name says more than its beginning. Square brackets are markup to the bars."""
    short = name if len(name) <= _NAME_WIDTH else "…" + name[1 - _NAME_WIDTH :]
    return short.translate(_CONTROLS).replace("[", "\\[")
