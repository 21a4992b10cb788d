"""Where a text may be cut, and how good a cut is there. Offsets count characters (code points)."""

from __future__ import annotations

import re
import unicodedata
from enum import IntEnum


class Border(IntEnum):
    """Better borders are larger."""

    CHARACTER = 0
    WORD = 1
    SENTENCE = 2
    PARAGRAPH = 3
    SECTION = 4


# Each pattern is one run of single-character classes after another, so matching is linear. A border lies where the
# match ends, except for sections, which begin where it starts.
_SECTION = re.compile(r"^(?:#{1,6}[ \t]|={4,}|-{4,}$|\f)", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n[ \t\r]*\n\s*")
_SENTENCE = re.compile(r"[.!?…][\"'”’)\]»]*\s+|[。！？．｡][」』”’）】]*\s*|\n\s*")
_WORD = re.compile(r"\s+|[^\x00-\u2fff\U00010000-\U0010ffff]")  # after spaces, and after each letter of CJK scripts

_JOINERS = "\u200d\u200c"
_REGIONAL_FIRST, _REGIONAL_LAST = 0x1F1E6, 0x1F1FF
_MODIFIERS = range(0x1F3FB, 0x1F400)  # skin tones
_MAX_FLAGS = 64  # how far back flags are paired; a longer row of them may be cut between the halves of one


def find_borders(text: str) -> dict[int, Border]:
    """Offset -> the best border there, for every border better than CHARACTER that cuts no visible character."""
    found: dict[int, Border] = {}
    for border, pattern in (
        (Border.WORD, _WORD),
        (Border.SENTENCE, _SENTENCE),
        (Border.PARAGRAPH, _PARAGRAPH),
        (Border.SECTION, _SECTION),
    ):
        for match in pattern.finditer(text):
            offset = match.start() if border is Border.SECTION else match.end()
            if is_whole(text, offset):
                found[offset] = border
    return found


def is_whole(text: str, offset: int) -> bool:
    """Whether a cut before `offset` leaves visible characters whole: accents, joined emoji, flags, CR LF."""
    if offset <= 0 or offset >= len(text):
        return True
    before, after = text[offset - 1], text[offset]
    if before == "\r" and after == "\n":
        return False
    if before == "\u200d" or after in _JOINERS or ord(after) in _MODIFIERS:
        return False
    if unicodedata.category(after) in ("Mn", "Mc", "Me"):
        return False
    if _is_regional(after) and _is_regional(before):
        return _num_regional_before(text, offset) % 2 == 0
    return not (_is_jamo_vowel_or_tail(after) and _is_hangul(before))


def _is_regional(character: str) -> bool:
    return _REGIONAL_FIRST <= ord(character) <= _REGIONAL_LAST


def _num_regional_before(text: str, offset: int) -> int:
    start = offset
    while start > 0 and offset - start < _MAX_FLAGS and _is_regional(text[start - 1]):
        start -= 1
    return offset - start


def _is_jamo_vowel_or_tail(character: str) -> bool:
    return "\u1160" <= character <= "\u11ff"


def _is_hangul(character: str) -> bool:
    return "\u1100" <= character <= "\u11ff" or "\uac00" <= character <= "\ud7a3"
