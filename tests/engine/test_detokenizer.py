"""Deltas: whole characters, nothing twice, no stop text, no lost tail; the same for the same ids."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.text.detokenizer import Detokenizer
from engine.text.stops import MAX_STOP_CHARACTERS, StopStrings
from engine.text.tokenizer import Tokenizer

EMOJI = "😀"
ids_of_any_kind = st.lists(st.integers(0, 319), max_size=40)
short_stops = st.lists(st.text(st.sampled_from("abthe 😀é"), min_size=1, max_size=4), min_size=1, max_size=4)


def run(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """The deltas as an engine would see them: it stops pushing where a stop string is found."""
    deltas = []
    for token_id in token_ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stop_reason is not None:
            break
    return [*deltas, detokenizer.flush()]


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in data]


@settings(max_examples=300, deadline=None)
@given(ids=ids_of_any_kind)
def test_joined_deltas_are_the_text(tiny_tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(run(Detokenizer(tiny_tokenizer), ids)) == tiny_tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_no_delta_holds_half_a_character(tiny_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tiny_tokenizer)
    said = ""
    for token_id in bytes_as_ids(tiny_tokenizer, text.encode()):
        said += detokenizer.push(token_id)
        assert text.startswith(said)
    assert said == text
    assert detokenizer.flush() == ""


def test_a_character_comes_with_its_last_byte(tiny_tokenizer: Tokenizer) -> None:
    ids = bytes_as_ids(tiny_tokenizer, f"a{EMOJI}b".encode())
    assert run(Detokenizer(tiny_tokenizer), ids) == ["a", "", "", "", EMOJI, "b", ""]


@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_emoji_cut_short_becomes_one_replacement_at_the_end(tiny_tokenizer: Tokenizer, num_bytes: int) -> None:
    ids = bytes_as_ids(tiny_tokenizer, EMOJI.encode()[:num_bytes])
    deltas = run(Detokenizer(tiny_tokenizer), ids)
    assert deltas == [""] * num_bytes + ["\ufffd"]
    assert "".join(deltas) == tiny_tokenizer.decode(ids)


def test_special_tokens_say_nothing_and_break_nothing(tiny_tokenizer: Tokenizer) -> None:
    first, *rest = bytes_as_ids(tiny_tokenizer, EMOJI.encode())
    ids = [1, first, 2, *rest, 2]
    assert "".join(run(Detokenizer(tiny_tokenizer), ids)) == EMOJI == tiny_tokenizer.decode(ids)


# A prompt that ends inside a character.


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_output_may_finish_the_prompts_character(tiny_tokenizer: Tokenizer, cut: int) -> None:
    data = f"hi {EMOJI}".encode()
    prompt = bytes_as_ids(tiny_tokenizer, data[: 3 + cut])
    output = bytes_as_ids(tiny_tokenizer, data[3 + cut :] + b"!")
    detokenizer = Detokenizer(tiny_tokenizer, prompt)
    assert "".join(run(detokenizer, output)) == f"{EMOJI}!"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_the_prompts_broken_character_is_not_said_again(tiny_tokenizer: Tokenizer, cut: int) -> None:
    prompt = bytes_as_ids(tiny_tokenizer, b"hi " + EMOJI.encode()[:cut])
    for new in ("new", EMOJI, "é"):
        detokenizer = Detokenizer(tiny_tokenizer, prompt)
        assert "".join(run(detokenizer, bytes_as_ids(tiny_tokenizer, new.encode()))) == new
    assert Detokenizer(tiny_tokenizer, prompt).flush() == ""


def test_a_prompts_character_that_stays_unfinished_is_one_replacement(tiny_tokenizer: Tokenizer) -> None:
    prompt, output = EMOJI.encode()[:1], EMOJI.encode()[1:2]
    detokenizer = Detokenizer(tiny_tokenizer, bytes_as_ids(tiny_tokenizer, prompt))
    assert run(detokenizer, bytes_as_ids(tiny_tokenizer, output)) == ["", "\ufffd"]


def test_a_whole_prompt_adds_nothing(tiny_tokenizer: Tokenizer) -> None:
    for text in ("plain", f"ends {EMOJI}", "ends é", ""):
        detokenizer = Detokenizer(tiny_tokenizer, tiny_tokenizer.encode(text))
        assert "".join(run(detokenizer, tiny_tokenizer.encode("out"))) == "out"


# Stop strings.


def plain_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop ends if text comes one character at a time, and the longest one ending there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(st.sampled_from("abthe 😀é"), max_size=40),
    stops=short_stops,
    include=st.booleans(),
    by_bytes=st.booleans(),
)
def test_stops_end_the_text_as_if_it_came_by_characters(
    tiny_tokenizer: Tokenizer, text: str, stops: list[str], include: bool, by_bytes: bool
) -> None:
    ids = bytes_as_ids(tiny_tokenizer, text.encode()) if by_bytes else tiny_tokenizer.encode(text)
    detokenizer = Detokenizer(tiny_tokenizer, stop=stops, include_stop_str_in_output=include)
    said = "".join(run(detokenizer, ids))
    found = plain_end(text, stops)
    if found is None:
        assert (said, detokenizer.stop_reason) == (text, None)
    else:
        end, stop = found
        assert detokenizer.stop_reason == stop
        assert said == text[: end if include else end - len(stop)]


@settings(max_examples=200, deadline=None)
@given(ids=ids_of_any_kind, stops=short_stops)
def test_nothing_said_is_ever_taken_back(tiny_tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> None:
    """No prefix of the deltas goes beyond the final text: what may become a stop waits."""
    deltas = run(Detokenizer(tiny_tokenizer, stop=stops), ids)
    whole = tiny_tokenizer.decode(ids)
    found = plain_end(whole, stops)
    final = whole if found is None else whole[: found[0] - len(found[1])]
    assert "".join(deltas) == final
    for count in range(len(deltas)):
        assert final.startswith("".join(deltas[:count]))


@settings(max_examples=100, deadline=None)
@given(ids=ids_of_any_kind, stops=short_stops, cut=st.integers(0, 40))
def test_replay_gives_the_same_deltas(tiny_tokenizer: Tokenizer, ids: list[int], stops: list[str], cut: int) -> None:
    whole = run(Detokenizer(tiny_tokenizer, stop=stops), ids)
    again = Detokenizer(tiny_tokenizer, stop=stops)
    head = [again.push(token_id) for token_id in ids[:cut]]
    if again.stop_reason is None:
        assert head + run(again, ids[cut:]) == whole


def test_only_what_may_become_a_stop_is_held_back(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer, stop=["xyz"])
    ids = bytes_as_ids(tiny_tokenizer, b"axybxxyz!")
    assert [detokenizer.push(i) for i in ids[:5]] == ["a", "", "", "xyb", ""]
    assert [detokenizer.push(i) for i in ids[5:]] == ["x", "", "", ""]
    assert detokenizer.stop_reason == "xyz"
    assert detokenizer.flush() == ""


def test_the_tail_held_for_a_stop_is_not_lost(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer, stop=["xyz"])
    assert run(detokenizer, bytes_as_ids(tiny_tokenizer, b"axy")) == ["a", "", "", "xy"]


def test_a_stop_inside_one_token(tiny_tokenizer: Tokenizer) -> None:
    """ " the" is one token; the stop "h" is in its middle."""
    ids = tiny_tokenizer.encode(" the end")
    assert tiny_tokenizer.token_bytes(ids[0]) == b" the"
    detokenizer = Detokenizer(tiny_tokenizer, stop=["h"])
    assert detokenizer.push(ids[0]) == " t"
    assert detokenizer.stop_reason == "h"
    assert detokenizer.push(ids[1]) == ""


def test_a_stop_ending_in_an_emoji_waits_for_its_last_byte(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer, stop=[f"b{EMOJI}"])
    ids = bytes_as_ids(tiny_tokenizer, f"ab{EMOJI}".encode())
    assert [detokenizer.push(i) for i in ids] == ["a", "", "", "", "", ""]
    assert detokenizer.stop_reason == f"b{EMOJI}"


def test_stops_look_at_the_output_alone(tiny_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tiny_tokenizer, tiny_tokenizer.encode("en"), stop=["end"])
    assert "".join(run(detokenizer, tiny_tokenizer.encode("d of it"))) == "d of it"


def test_stops_count_only_after_min_tokens(tiny_tokenizer: Tokenizer) -> None:
    ids = bytes_as_ids(tiny_tokenizer, b"ab.cd.ef")
    detokenizer = Detokenizer(tiny_tokenizer, stop=["."], min_tokens=3)
    assert "".join(run(detokenizer, ids)) == "ab.cd"
    detokenizer = Detokenizer(tiny_tokenizer, stop=["b.c"], min_tokens=3)
    assert "".join(run(detokenizer, ids)) == "ab.cd.ef", "a stop that begins before them does not count"


@pytest.mark.parametrize("stops", [[""], ["a", ""], ["x" * (MAX_STOP_CHARACTERS + 1)]])
def test_stops_that_cannot_be_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        StopStrings(stops)
    assert caught.value.param == "stop"


def test_thousands_of_stops_take_one_look_per_character() -> None:
    """As many node changes as a single stop needs: at most two per character, whatever the number of stops."""

    class Counting(StopStrings):
        num_lookups = 0

        def advance(self, node: int, character: str) -> int:
            self.num_lookups += 1
            return super().advance(node, character)

    stops = Counting([f"{number:05d}x" for number in range(5000)])
    stops.num_lookups = 0
    text = "00417 is not a stop " * 500
    node, match = stops.scan(0, text)
    assert match is None
    assert stops.num_lookups == len(text)
    assert stops.scan(node, "04999x")[1] is not None
