"""The demo with the fake model, what makes it fail, and the corpus that it reads."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.demo import CORPUS, DemoFailed, Lines, check_nothing_is_left, check_outcome, closing_line, read_corpus
from millstream.summarize.documents import Document
from millstream.summarize.progress import DocumentProgress
from millstream.summarize.session import Totals

CLOSING = re.compile(r"demo ok: (\d+) documents, (\d+) chunks, ([\d.]+) s, (\d+) tok/s, coverage ([\d.]+)%")

TOTALS = Totals(num_chunks=27, num_bytes=100, num_bytes_summarized=100, num_tokens=1000)
GIVEN = [Document("a", "a.txt", text="text"), Document("e", "empty.txt", text="")]
ENDED = [
    DocumentProgress("a", "a.txt", "succeeded", summary="A text."),
    DocumentProgress("e", "empty.txt", "failed", error="empty.txt is empty: there is nothing to summarize"),
]


def run_demo(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.demo", *arguments],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=CORPUS.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_demo_runs_to_its_closing_line(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--model", "fake")
    assert done.returncode == 0, done.stdout + done.stderr
    match = CLOSING.fullmatch(done.stdout.splitlines()[-1])
    assert match, done.stdout
    assert (int(match[1]), match[5]) == (10, "100.0")
    assert int(match[2]) > 20
    assert "empty.txt | [no summary] empty.txt is empty" in done.stdout
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_demo_that_cannot_start_says_why(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--model", "no-such-model")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("demo failed: worker ended with exit code 1: ")
    assert "no model 'no-such-model'" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_good_outcome_passes() -> None:
    check_outcome(GIVEN, ENDED, TOTALS, num_pieces=9)
    assert CLOSING.fullmatch(closing_line(10, TOTALS, 12.34))
    assert closing_line(10, TOTALS, 12.5) == "demo ok: 10 documents, 27 chunks, 12.5 s, 80 tok/s, coverage 100.0%"


@pytest.mark.parametrize(
    ("ended", "totals", "num_pieces", "words"),
    [
        ([replace(ENDED[0], summary=None, status="failed", error="it broke"), ENDED[1]], TOTALS, 9, "it broke"),
        ([replace(ENDED[0], summary=" \n"), ENDED[1]], TOTALS, 9, "a.txt has no summary"),
        ([ENDED[0], replace(ENDED[1], status="succeeded", error=None)], TOTALS, 9, "ended as succeeded"),
        ([ENDED[0], replace(ENDED[1], error="worker lost")], TOTALS, 9, "worker lost"),
        (ENDED, replace(TOTALS, num_bytes_summarized=99), 9, "only 99 of 100 bytes"),
        (ENDED, TOTALS, 1, "only 1 pieces"),
    ],
)
def test_a_bad_outcome_fails(ended: list[DocumentProgress], totals: Totals, num_pieces: int, words: str) -> None:
    with pytest.raises(DemoFailed, match=words):
        check_outcome(GIVEN, ended, totals, num_pieces)


def test_a_process_that_is_left_is_found() -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(DemoFailed, match=r"still running: .*time\.sleep"):
            check_nothing_is_left()
    finally:
        left.kill()
        left.wait()


@given(
    st.text(alphabet=st.sampled_from("ab \n日"), max_size=400),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
def test_lines_hold_the_whole_summary_once(text: str, cuts: list[int], lags: bool) -> None:
    """However the pieces fall, and also where the stream lags behind the end."""
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    lines = Lines()
    lines.opened([ENDED[0]])
    with redirect_stdout(io.StringIO()) as out:
        for piece in pieces[:-1] if lags else pieces:
            lines.piece("a", piece)
        lines.finished(replace(ENDED[0], summary=text))
    said = [line.removeprefix("a.txt | ") for line in out.getvalue().splitlines()]
    assert "".join("".join(said).split()) == "".join(text.split())
    assert all(len(line) <= 88 or " " not in line[:88].strip() for line in said)


# --- the corpus ---


def test_the_corpus_has_what_the_demo_promises() -> None:
    documents = read_corpus()
    assert [document.problem for document in documents] == [None] * len(documents)
    sizes = {document.name: len((document.text or "").encode()) for document in documents}
    assert sum(size > 0 for size in sizes.values()) >= 8
    assert sizes["empty.txt"] == 0
    assert len({size // 500 for size in sizes.values()}) >= 8  # of different lengths
    texts = "".join(document.text or "" for document in documents)
    for kind in ("[\u4e00-\u9fff]", "[\u3040-\u30ff]", "[\U0001f300-\U0001faff]"):  # Han, kana, emoji
        assert len(re.findall(kind, texts)) > 0, kind


def test_the_corpus_is_listed_licensed_and_small() -> None:
    readme = (CORPUS / "README.md").read_text()
    for document in read_corpus():
        assert f"| `{document.name}` |" in readme
    for licence in re.findall(r"\]\((licenses/[^)]+)\)", readme):
        assert (CORPUS / licence).stat().st_size > 500
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 400_000


@pytest.mark.real_model
def test_the_corpus_in_the_model_s_tokens() -> None:
    """One document over 4,000 tokens, and a total that the demo's time is planned for."""
    from engine.text.tokenizer import Tokenizer
    from engine.weights.resolve import resolve

    tokenizer = Tokenizer(resolve("smollm2-135m"))
    counts = {document.name: len(tokenizer.encode(document.text or "")) for document in read_corpus()}
    assert counts["python-general-faq.txt"] > 4_000
    assert 12_000 < sum(counts.values()) < 16_000
    readme = (CORPUS / "README.md").read_text()
    for name, count in counts.items():
        assert f"| `{name}` | {count:,} |" in readme
