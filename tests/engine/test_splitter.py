"""Chunks cover the document, hold whole characters, fit their size, and end where a reader would pause."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.text.borders import is_whole
from engine.text.splitter import Chunk, split_document, token_ends
from engine.text.tokenizer import Tokenizer


def check(text: str, tokenizer: Tokenizer, max_tokens: int, overlap_tokens: int = 0) -> list[Chunk]:
    """The invariants of every split."""
    data = text.encode()
    chunks = split_document(text, tokenizer, max_tokens, overlap_tokens)
    assert (chunks == []) == (not text.strip())
    if not chunks:
        return chunks
    assert chunks[0].start_byte == chunks[0].fresh_byte == 0
    assert chunks[-1].end_byte == len(data)
    for index, chunk in enumerate(chunks):
        assert chunk.index == index
        assert data[chunk.start_byte : chunk.end_byte].decode() == chunk.text
        assert 1 <= chunk.num_tokens <= max_tokens
        assert len(tokenizer.encode(chunk.text, add_special_tokens=False)) == chunk.num_tokens
        assert chunk.start_byte <= chunk.fresh_byte < chunk.end_byte
    for before, after in pairwise(chunks):
        assert after.fresh_byte == before.end_byte
        assert before.start_byte < after.start_byte <= before.end_byte
        if not overlap_tokens:
            assert after.start_byte == before.end_byte
    return chunks


PIECES = ["word ", "longerword", " ", "\n", "\n\n", ". ", "。", "漢字", "😀", "👩\u200d👧", "🇩🇪", "é", "e\u0301"]
PIECES += ["# H\n", "\r\n", "٣", "한"]


@settings(max_examples=120, deadline=None)
@given(
    text=st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=150).map("".join)),
    max_tokens=st.integers(16, 60),
    share=st.floats(0, 0.5),
)
def test_every_split_keeps_the_invariants(tiny_tokenizer: Tokenizer, text: str, max_tokens: int, share: float) -> None:
    check(text, tiny_tokenizer, max_tokens, int(max_tokens * share))


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=200).map("".join), max_tokens=st.integers(16, 40))
def test_also_with_the_real_vocabulary(real_tokenizer: Tokenizer, text: str, max_tokens: int) -> None:
    check(text, real_tokenizer, max_tokens, max_tokens // 4)


def test_a_short_document_is_one_chunk(real_tokenizer: Tokenizer) -> None:
    (chunk,) = check("Just one sentence.", real_tokenizer, 100)
    assert chunk.text == "Just one sentence."


@pytest.mark.parametrize("text", ["", " ", "\n\t \n"])
def test_nothing_gives_no_chunks(real_tokenizer: Tokenizer, text: str) -> None:
    assert split_document(text, real_tokenizer, 100) == []


def test_sections_are_kept_together(real_tokenizer: Tokenizer) -> None:
    sections = [f"# Part {n}\n\n" + f"Sentence number {n} says something. " * 12 + "\n\n" for n in range(5)]
    chunks = check("".join(sections), real_tokenizer, 130)
    assert [chunk.text for chunk in chunks] == sections


def test_paragraphs_before_sentences_before_words(real_tokenizer: Tokenizer) -> None:
    sentence = "This is a sentence of nine words or so. "
    paragraphs = (sentence * 6 + "\n\n") * 4
    for chunk in check(paragraphs, real_tokenizer, 75):
        assert chunk.text.endswith("\n\n")
    for chunk in check(sentence * 40, real_tokenizer, 75):
        assert chunk.text.endswith(". ")
    for chunk in check("word " * 400, real_tokenizer, 75):
        assert chunk.text.endswith(" ")


def test_cjk_ends_at_its_own_full_stop(real_tokenizer: Tokenizer) -> None:
    for chunk in check("今日は天気がいいので、公園を散歩しました。" * 20, real_tokenizer, 120):
        assert chunk.text.endswith("。")


def test_overlap_repeats_about_as_much_as_asked(real_tokenizer: Tokenizer) -> None:
    text = "".join(f"Sentence number {n} is here to be read. " for n in range(200))
    chunks = check(text, real_tokenizer, 100, overlap_tokens=30)
    data = text.encode()
    for chunk in chunks[1:]:
        repeated = data[chunk.start_byte : chunk.fresh_byte].decode()
        assert 10 <= len(real_tokenizer.encode(repeated)) <= 34
        assert chunk.text.startswith("Sentence")


def test_visible_characters_stay_whole(real_tokenizer: Tokenizer) -> None:
    for text in ("👩‍👩‍👧‍👦" * 60, "🇩🇪🇫🇷" * 80, "e\u0301o\u0308" * 150, "👍🏽" * 90, "각" * 100):
        for chunk in check(unicodedata.normalize("NFD", text), real_tokenizer, 40)[1:]:
            whole = unicodedata.normalize("NFD", text)
            assert is_whole(whole, len(whole.encode()[: chunk.start_byte].decode()))


@pytest.mark.parametrize(
    ("text", "offset", "whole"),
    [
        ("ab", 1, True),
        ("\r\n", 1, False),
        ("e\u0301", 1, False),
        ("👩\u200d👧", 1, False),
        ("👩\u200d👧", 2, False),
        ("👍🏽", 1, False),
        ("☎\ufe0f", 1, False),
        ("🇩🇪🇫🇷", 1, False),
        ("🇩🇪🇫🇷", 2, True),
        ("a🇩🇪", 1, True),
        ("\u1112\u1161\u11ab", 1, False),
        ("漢字", 1, True),
    ],
)
def test_where_a_visible_character_may_be_cut(text: str, offset: int, whole: bool) -> None:
    assert is_whole(text, offset) is whole


class CountingTokenizer:
    """Counts the characters that go through the real one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0
        self.longest = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_characters += len(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        self.num_characters += len(text)
        self.longest = max(self.longest, len(text))
        return self._tokenizer.encode_with_offsets(text)


@pytest.mark.parametrize(
    "unit", ["a", "-", " x", "漢", "😀", "\u0301", "🇩", "\n", "word. ", "1", ".'", "\r\n"], ids=lambda unit: ascii(unit)
)
def test_work_is_linear_also_for_one_endless_line(real_tokenizer: Tokenizer, unit: str) -> None:
    """Each character goes through the tokenizer about twice: once to place the tokens, once to count its chunk."""
    text = "x" + unit * (300_000 // len(unit))
    counting = CountingTokenizer(real_tokenizer)
    chunks = split_document(text, counting, 512)  # type: ignore[arg-type]
    assert chunks[-1].end_byte == len(text.encode())
    assert counting.num_characters < 3 * len(text)
    assert counting.longest <= 65_536


def test_an_edit_leaves_the_chunks_behind_it_alone(real_tokenizer: Tokenizer) -> None:
    """Cuts fall on the document's own borders, so after a change they soon fall on the same ones again."""
    paragraphs = [f"Paragraph {n}. " + "It goes on for a while with words. " * (3 + n % 4) + "\n\n" for n in range(80)]
    before = {chunk.text for chunk in check("".join(paragraphs), real_tokenizer, 300)}
    paragraphs[10] = "This paragraph was changed and is now longer. " * 9 + "\n\n"
    after = [chunk.text for chunk in check("".join(paragraphs), real_tokenizer, 300)]
    changed = [text for text in after if text not in before]
    assert len(changed) <= len(after) // 2


def test_token_places_of_a_long_document_are_those_of_one_piece(real_tokenizer: Tokenizer) -> None:
    text = "Some words, then 漢字 and 😀 again. " * 5000
    _, offsets = real_tokenizer.encode_with_offsets(text)
    assert token_ends(text, real_tokenizer) == [end for _, end in offsets]


@pytest.mark.parametrize(
    ("max_tokens", "overlap", "param"),
    [(15, 0, "max_tokens"), (100, 51, "overlap_tokens"), (100, -1, "overlap_tokens")],
)
def test_sizes_without_room_are_refused(real_tokenizer: Tokenizer, max_tokens: int, overlap: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        split_document("text", real_tokenizer, max_tokens, overlap)
    assert caught.value.param == param
