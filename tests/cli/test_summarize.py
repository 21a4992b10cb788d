"""`millstream summarize` and what is under it, through every part, with the fake model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import EngineConfig
from infra.settings import GatewaySettings, PipelineSettings, StoreSettings, WorkerSettings
from millstream import Client, Stack
from millstream.client.errors import ApiError
from millstream.client.job import JobHandle
from millstream.stack.settings import UpSettings
from millstream.summarize import session as session_module
from millstream.summarize.documents import Document, read_documents
from millstream.summarize.follow import FindJob, Follower
from millstream.summarize.progress import DocumentProgress, Listener
from millstream.summarize.session import Session
from tests.cli.processes import WAIT_SECONDS

LONG = "The mill stands by the stream. " * 120
SHORT = "一条小溪流过磨坊 😀。The wheel turns."
SMALL = ("--chunk-tokens", "400", "--target-tokens", "30")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    stack = Stack(
        store=StoreSettings(cache_dir=folder),
        gateway=GatewaySettings(port=0, max_body_bytes=60_000),
        worker=WorkerSettings(model="fake"),
        engine=EngineConfig(fake_seconds_per_step=0.005),
        pipelines=PipelineSettings(file_roots=str(folder)),
        up=UpSettings(data_dir=folder),
    )
    with stack:
        yield stack


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """A long text, an empty one, one in Latin-1, a short one with CJK and emoji, and one that is not there."""
    (tmp_path / "long.txt").write_text(LONG)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.md").write_text(SHORT)
    return [str(tmp_path / name) for name in ("long.txt", "empty.txt", "latin.txt", "short.md", "none.txt")]


def summarize(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream", "summarize", *arguments, "--url", stack.url],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )


def test_text_for_people(stack: Stack, files: list[str]) -> None:
    done = summarize(stack, *files, *SMALL)
    assert done.returncode == 1  # three documents have no summary
    blocks = done.stdout.rstrip("\n").split("\n\n")
    assert [block.split("\n")[0] for block in blocks] == [f"== {name}" for name in files]
    long, empty, latin, short, none = (block.split("\n", 1)[1] for block in blocks)
    assert empty.startswith("error: ") and "is empty" in empty
    assert latin.startswith("error: not UTF-8 text: byte 3 is 0xe9")
    assert none == "error: there is no such file"
    assert len(long) > 10 and len(short) > 10
    lines = done.stderr.splitlines()
    assert lines[0] == "5 documents"
    assert any(line.startswith(f"{files[0]}: ") and line.endswith(" chunks") for line in lines)
    assert lines[-1].startswith("2 of 5 documents summarized: ")
    assert lines[-1].endswith("coverage 100.0%")


def test_json_for_programs(stack: Stack, files: list[str], tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    done = summarize(stack, *files, *SMALL, "--json", "--output", str(output))
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert sorted(rows) == sorted(files)
    assert [json.loads(line)["name"] for line in output.read_text().splitlines()] == files
    long = rows[files[0]]
    assert long["status"] == "succeeded" and long["summary"] and long["error"] is None
    assert long["chunks"]["total"] > 5 and long["chunks"]["done"] == long["chunks"]["total"]
    assert long["usage"]["completion_tokens"] > 0
    assert rows[files[1]]["summary"] is None and "is empty" in rows[files[1]]["error"]


def test_all_good_is_exit_code_0(stack: Stack, files: list[str]) -> None:
    assert summarize(stack, files[3], *SMALL).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "name the files to summarize"),
        (("--style", "poem", "x.txt"), 2, "poem"),
        (("--model", "nobody", "{short}"), 1, "nobody"),
        (("--target-tokens", "0", "{short}"), 1, "target_tokens"),
    ],
)
def test_refusals_are_one_line(arguments: Sequence[str], code: int, words: str, stack: Stack, files: list[str]) -> None:
    done = summarize(stack, *(argument.format(short=files[3]) for argument in arguments))
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.splitlines()[-1].startswith("millstream: ")
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_interrupted_it_cancels_what_it_started(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "very-long.txt"
    path.write_text(LONG * 12)
    process = subprocess.Popen(
        [sys.executable, "-m", "millstream", "summarize", str(path), "--url", stack.url, *SMALL],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr as lines:
        assert next(lines) == "1 document\n"
        next(lines)  # its chunks are on their way
        process.send_signal(signal.SIGINT)
        rest = lines.read()
    assert process.wait(WAIT_SECONDS) == 130, rest
    assert rest.splitlines()[-1] == "millstream: stopped"
    with Client(stack.url) as client:
        end = time.monotonic() + WAIT_SECONDS
        while any(job.status in ("queued", "running") for job in client.jobs()):
            assert time.monotonic() < end, "its jobs go on"
            time.sleep(0.1)


POLL_SECONDS = 0.02
MOST_LOOKS = int(WAIT_SECONDS / POLL_SECONDS)


class Recorder(Listener):
    def __init__(self) -> None:
        self.pieces: dict[str, list[str]] = {}
        self.ends: list[str] = []
        self.counts: dict[str, list[int]] = {}
        self.notes: list[str] = []
        self.looks: Counter[str] = Counter()  # at documents whose end waits for their pieces

    def changed(self, document: DocumentProgress) -> None:
        self.counts.setdefault(document.name, []).append(document.num_chunks_done)

    def piece(self, document_id: str, text: str) -> None:
        assert document_id not in self.ends
        self.pieces.setdefault(document_id, []).append(text)

    def finished(self, document: DocumentProgress) -> None:
        self.ends.append(document.id)

    def noted(self, text: str) -> None:
        self.notes.append(text)


See = Callable[[DocumentProgress, Recorder], DocumentProgress]


def as_it_is(document: DocumentProgress, recorder: Recorder) -> DocumentProgress:
    return document


def follow(
    client: Client, documents: Sequence[Document], see: See = as_it_is, find_job: FindJob | None = None
) -> tuple[list[DocumentProgress], Recorder, Session]:
    """`see` gives what the follower sees of a document, given how it stands and what was shown so far."""
    session = Session(client, documents)
    session.start(lambda some: client.summarize(some, model="fake", target_tokens=60, chunk_tokens=400))
    recorder = Recorder()

    def look() -> list[DocumentProgress]:
        return [see(document, recorder) for document in session.look()]

    job = find_job or session.job
    return Follower(look, job, [recorder], poll_seconds=POLL_SECONDS).follow(), recorder, session


def shown(document: DocumentProgress, recorder: Recorder) -> str:
    return "".join(recorder.pieces.get(document.id, ())).strip()


def unended_until_it_was_streamed(document: DocumentProgress, recorder: Recorder) -> DocumentProgress:
    """A document may end between two looks, before its first piece comes: here its end waits for its last piece."""
    is_seen = document.summary is None or document.summary == shown(document, recorder)
    if is_seen or recorder.looks[document.id] > MOST_LOOKS:
        return document
    recorder.looks[document.id] += 1
    return replace(document, status="running", summary=None)


def test_summaries_are_streamed_as_they_are_written(stack: Stack) -> None:
    documents = [Document("a", "a.txt", text=LONG), Document("b", "b.txt", text=SHORT)]
    with Client(stack.url) as client:
        ended, recorder, session = follow(client, documents, unended_until_it_was_streamed)
        totals = session.totals()
    assert (sorted(recorder.ends), recorder.notes) == (["0", "1"], [])
    for document in ended:
        assert len(recorder.pieces[document.id]) > 1
        assert shown(document, recorder) == document.summary
    assert recorder.counts["a.txt"] == sorted(recorder.counts["a.txt"])
    assert totals.coverage == 1.0
    assert totals.num_bytes == len(LONG.encode()) + len(SHORT.encode())
    assert totals.num_chunks == sum(document.num_chunks or 0 for document in ended)


def test_a_job_that_is_named_before_it_is_queued_is_streamed_once_it_is_there(stack: Stack) -> None:
    asked: list[str] = []

    def find_job(job_id: str) -> JobHandle:
        asked.append(job_id)
        is_early = asked.count(job_id) < 3
        return client.job(job_id[:-4] + "zzzz" if is_early else job_id)  # the former is unknown to the gateway

    with Client(stack.url) as client:
        (document,), recorder, _ = follow(
            client, [Document("a", "a.txt", text=SHORT)], unended_until_it_was_streamed, find_job
        )
    assert shown(document, recorder) == document.summary
    assert (recorder.ends, recorder.notes) == (["0"], [])
    assert asked == [asked[0]] * 3


def test_more_than_one_body_holds_is_sent_as_several_runs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway of this test takes 60,000 bytes: what is too large for it alone is an error of that document."""
    documents = [Document(str(n), f"{n}.txt", text=SHORT * 20) for n in range(4)]
    documents.insert(2, Document("big", "big.txt", text="x" * 70_000))
    documents.insert(0, Document("bad", "bad.txt", problem="there is no such file"))
    monkeypatch.setattr(session_module, "MAX_RUN_DOCUMENTS", 3)
    with Client(stack.url) as client:
        ended, _, session = follow(client, documents)
    assert [document.name for document in ended] == [document.name for document in documents]
    assert len(session._runs) > 2
    errors = {document.name: document.error for document in ended if document.error}
    assert errors.keys() == {"bad.txt", "big.txt"}
    assert errors["bad.txt"] == "there is no such file"
    assert "60000" in str(errors["big.txt"]).replace(",", "") and "file:// or s3://" in str(errors["big.txt"])


def test_addresses_are_read_where_the_run_is(stack: Stack, tmp_path: Path) -> None:
    inside, outside = stack.data_dir / "inside.txt", tmp_path / "outside.txt"
    for path in (inside, outside):
        path.write_text(SHORT)
    with Client(stack.url) as client:
        ended, _, _ = follow(client, read_documents([inside.as_uri(), outside.as_uri(), "ftp://host/file.txt"]))
    assert [document.status for document in ended] == ["succeeded", "failed", "failed"]
    assert ended[2].error == "only file:// and s3:// addresses are read"


def test_client_runs(stack: Stack) -> None:
    with Client(stack.url) as client:
        run = client.summarize([LONG, {"text": SHORT, "name": "short"}], model="fake", target_tokens=20,
                               idempotency_key="one-run")  # fmt: skip
        again = client.summarize([LONG, {"text": SHORT, "name": "short"}], model="fake", target_tokens=20,
                                 idempotency_key="one-run")  # fmt: skip
        assert again.id == run.id
        out = run.wait(WAIT_SECONDS)
        assert out.status == "succeeded"
        assert [document.name for document in out.documents] == ["0", "short"]
        report = run.report()
        assert (report.coverage, report.failures, report.document_errors) == (1.0, [], {})
        assert run.cancel().status == "succeeded"  # too late, and harmless
        with pytest.raises(ApiError, match="no run"):
            client.run("run-zzzzzzzzzzzz").get()


def test_local_starts_everything_for_one_call(files: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "millstream", "summarize", files[3], "--local", "--model", "fake", *SMALL],
        env={**os.environ, "MILLSTREAM_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"== {files[3]}\n")
    assert list(tmp_path.glob("millstream-*")) == []
