"""Documents from files: a bad one says why, the others are read."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from millstream.summarize.documents import Document, read_documents


def test_texts_in_the_order_named(tmp_path: Path) -> None:
    one, two, three = tmp_path / "one.txt", tmp_path / "two.md", tmp_path / "three.txt.gz"
    one.write_bytes(b"\xef\xbb\xbfwith a mark")
    two.write_text("日本 😀", encoding="utf-16")
    three.write_bytes(gzip.compress(b"packed", mtime=0))
    documents = read_documents([str(two), str(one), str(three)])
    assert [document.text for document in documents] == ["日本 😀", "with a mark", "packed"]
    assert [document.problem for document in documents] == [None, None, None]


def test_an_empty_file_is_a_document(tmp_path: Path) -> None:
    """What becomes of it is the run's to say, in the report."""
    (tmp_path / "empty.txt").touch()
    assert read_documents([str(tmp_path / "empty.txt")])[0].text == ""


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 text: byte 3 is 0xe9; if it is text of another encoding"),
        ("half.txt", "日本".encode()[:-1], "not UTF-8 text: byte 3 is 0xe6"),
        ("odd.txt", b"\xff\xfea", "not UTF-8 text"),
        ("torn.txt.gz", gzip.compress(b"packed text", mtime=0)[:-6], "not a whole gzip file"),
        ("plain.txt.gz", b"never packed", "not a whole gzip file"),
        ("paper.pdf", b"%PDF-1.7", "PDF is not read yet; convert it first"),
        ("page.html", b"<p>", "HTML is not read yet"),
    ],
)
def test_a_bad_file_hurts_itself_alone(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / name
    good.write_text("good")
    bad.write_bytes(content)
    first, second, third = read_documents([str(good), str(bad), str(good)])
    assert first == Document(id=str(good), name=str(good), text="good")
    assert (second.name, second.text) == (str(bad), None)
    assert problem in str(second.problem)
    assert (third.id, third.text) == (f"{good}#2", "good")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    locked = tmp_path / "locked.txt"
    locked.touch(mode=0o000)
    names = [str(tmp_path), str(tmp_path / "none.txt")]
    problems = [document.problem for document in read_documents(names)]
    assert problems == ["it is a folder; name the files in it", "there is no such file"]
    if os.geteuid() != 0:  # root may read everything
        assert read_documents([str(locked)])[0].problem == "it may not be read: permission denied"


def test_uris_are_left_to_the_run() -> None:
    assert read_documents(["s3://bucket/key.txt"]) == [
        Document(id="s3://bucket/key.txt", name="s3://bucket/key.txt", uri="s3://bucket/key.txt")
    ]


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text(
        '{"id": "a", "text": "one"}\n\n{"id": "b", "uri": "s3://b/k", "name": "B"}\n{"id": "a", "text": ""}\n'
        '{"id": "c"}\n{"id": "d", "text": 3}\nnot json\n{"id": "e", "text": "x", "txt": "y"}\n'
    )
    documents = read_documents([str(path)])
    assert [document.id for document in documents] == ["a", "b", "a#2", *(f"{path}:{n}" for n in (5, 6, 7, 8))]
    assert [document.text for document in documents] == ["one", None, "", None, None, None, None]
    assert documents[1] == Document(id="b", name="B", uri="s3://b/k")
    problems = [str(document.problem) for document in documents[3:]]
    for problem, words in zip(
        problems, ["either a text or a uri", "Expected `str", "malformed", "unknown field `txt`"], strict=True
    ):
        assert words in problem
