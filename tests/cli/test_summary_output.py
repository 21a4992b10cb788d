"""What is shown of a run: in order, whole, nothing twice."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from millstream.summarize.plain_output import JsonLines, PlainProgress, SummaryText
from millstream.summarize.progress import DocumentProgress
from millstream.summarize.terminal_output import TerminalProgress

A = DocumentProgress(id="a", name="a.txt", status="queued")
B = DocumentProgress(id="b", name="b.txt", status="queued")
A_DONE = replace(A, status="succeeded", summary="Alpha beta.", num_chunks=2, num_chunks_done=2)
B_FAILED = replace(B, status="failed", error="the document is empty")


def test_the_first_document_streams_and_the_next_waits() -> None:
    out = io.StringIO()
    text = SummaryText(out)
    text.opened([A, B])
    assert out.getvalue() == ""
    text.piece("a", " Alp")
    assert out.getvalue() == "== a.txt\nAlp"
    text.piece("b", "Early.")
    text.piece("a", "ha")
    assert out.getvalue() == "== a.txt\nAlpha"
    text.finished(A_DONE)
    assert out.getvalue() == "== a.txt\nAlpha beta.\n\n== b.txt\nEarly."
    text.piece("b", " More.")
    text.finished(replace(B, status="succeeded", summary="Early. More."))
    text.closed()
    assert out.getvalue() == "== a.txt\nAlpha beta.\n\n== b.txt\nEarly. More.\n\n"


def test_errors_take_the_summary_s_place() -> None:
    out = io.StringIO()
    text = SummaryText(out)
    text.opened([B, A])
    text.finished(A_DONE)
    text.finished(B_FAILED)
    assert out.getvalue() == "== b.txt\nerror: the document is empty\n\n== a.txt\nAlpha beta.\n\n"


def test_a_summary_written_by_another_job_starts_anew() -> None:
    out = io.StringIO()
    text = SummaryText(out)
    text.opened([A])
    text.piece("a", "Wrong")
    text.restarted("a")
    text.piece("a", "Alpha")
    text.finished(A_DONE)
    assert out.getvalue() == "== a.txt\nWrong\n[written anew]\nAlpha beta.\n\n"


def test_cut_short_in_the_middle() -> None:
    out = io.StringIO()
    text = SummaryText(out)
    text.opened([A])
    text.piece("a", "Alp")
    text.closed()
    assert out.getvalue() == "== a.txt\nAlp\n"


@given(st.data())
def test_however_pieces_and_ends_mingle_every_summary_is_there_once(data: st.DataObject) -> None:
    summaries = {name: f"The summary of {name}." for name in "abcd"}
    documents = [DocumentProgress(id=name, name=name, status="queued") for name in summaries]
    out = io.StringIO()
    text = SummaryText(out)
    text.opened(documents)
    left = dict(summaries)
    while left:
        name = data.draw(st.sampled_from(sorted(left)))
        if left[name] and data.draw(st.integers(0, 3)):
            length = data.draw(st.integers(1, len(left[name])))
            text.piece(name, left[name][:length])
            left[name] = left[name][length:]
        else:
            del left[name]
            text.finished(DocumentProgress(id=name, name=name, status="succeeded", summary=summaries[name]))
    text.closed()
    assert out.getvalue() == "".join(f"== {name}\n{summary}\n\n" for name, summary in summaries.items())


def test_plain_progress_is_one_line_a_step() -> None:
    err = io.StringIO()
    progress = PlainProgress(err)
    progress.opened([A, B])
    progress.changed(replace(A, num_chunks=2, num_chunks_done=1))
    progress.piece("a", "text")
    progress.finished(replace(A_DONE, failures=("map-1 (bytes 3 to 9): it broke",)))
    progress.finished(B_FAILED)
    assert err.getvalue().splitlines() == [
        "2 documents",
        "a.txt: 1/2 chunks",
        "a.txt: succeeded",
        "a.txt: map-1 (bytes 3 to 9): it broke",
        "b.txt: the document is empty",
    ]


def test_json_lines() -> None:
    out = io.StringIO()
    lines = JsonLines(out)
    lines.finished(A_DONE)
    lines.finished(B_FAILED)
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["id"], first["summary"], first["chunks"]) == (
        "a",
        "Alpha beta.",
        {"total": 2, "done": 2, "failed": 0},
    )
    assert (second["summary"], second["error"]) == (None, "the document is empty")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminal_prints_each_document_once_and_takes_no_text_for_markup(is_terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100, color_system=None)
    progress = TerminalProgress(console, with_summaries=True)
    odd = replace(A, name="[bold]a[/nope].txt")
    progress.opened([odd, B])
    progress.changed(replace(odd, num_chunks=3, num_chunks_done=1))
    progress.piece("a", "so far [/x] ")
    progress.restarted("a")
    progress.piece("a", "again")
    progress.finished(replace(odd, status="succeeded", summary="Summary with [/brackets] :smile:"))
    progress.piece("b", "no bar yet")
    progress.finished(B_FAILED)
    progress.noted("a [note]")
    progress.closed()
    shown = out.getvalue()
    assert shown.count("Summary with [/brackets] :smile:") == 1
    assert shown.count("[bold]a[/nope].txt\n") >= 1
    assert shown.count("error: the document is empty") == 1
    assert "a [note]" in shown


def test_terminal_obeys_no_control_characters() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=100, color_system=None)
    progress = TerminalProgress(console, with_summaries=True)
    bad = replace(A, name="a\x1b[2J.txt")
    progress.opened([bad])
    progress.changed(bad)
    progress.piece("a", "\x1b]0;title\x07 text")
    progress.finished(replace(bad, status="succeeded", summary="One\x1b[31m\x9b2J line\nand another"))
    progress.closed()
    assert "\x1b" not in out.getvalue() and "\x07" not in out.getvalue() and "\x9b" not in out.getvalue()
    assert "One\ufffd[31m\ufffd2J line\nand another" in out.getvalue()
