"""Proposes what followed the longest suffix of the text, in this text and in all earlier ones of its domain. Pure.

A domain is what may share cached prefixes: the same salt and adapter. Memory is bounded: a domain keeps two
generations of texts, and when there is too much the older goes, or the domain that was longest unused.

    old    | texts that were complete when it was closed |      looked up, no longer extended
    young  | texts since, those that still grow included |      looked up and extended
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from engine.speculation.proposal import NOTHING, Grade, Proposal
from engine.speculation.suffix_automaton import ROOT, SuffixAutomaton

if TYPE_CHECKING:
    from engine.sequence import Sequence

MAX_TOKENS = 200_000  # in all domains together; about a kilobyte each at most
_LEAST_SHARE = 0.2  # a continuation whose tokens all are what followed, goes on while that is at least so likely
_LEN_BORDERS = (2, 3, 5, 9)  # match lengths that begin a grade
_SHARE_BORDERS = (0.5, 0.9)  # of the first token among what followed


class SuffixProposer:
    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._domains: OrderedDict[tuple[str, str], _Domain] = OrderedDict()  # least recently used first
        self._cursors: WeakKeyDictionary[Sequence, _Cursor] = WeakKeyDictionary()

    @property
    def num_tokens(self) -> int:
        """Kept now; never more than `max_tokens` for longer than a call."""
        return sum(domain.num_tokens for domain in self._domains.values())

    def propose(self, sequence: Sequence, count: int, ahead: Listed[int] = ()) -> Proposal:
        """Graded by the length of the match and by how often the first token followed it."""
        cursor = self._cursor(sequence)
        cursor.advance(sequence.tokens(cursor.num_tokens, sequence.num_tokens))
        self._bound(cursor.domain)
        return max(cursor.proposals(count, ahead), key=lambda found: found.grades[:1])

    def _cursor(self, sequence: Sequence) -> _Cursor:
        """Where the sequence stands in its domain; where the domain was dropped meanwhile, it stands at a beginning."""
        name = (sequence.request.salt, sequence.request.adapter)
        domain = self._domains.get(name)
        if domain is None:
            domain = self._domains[name] = _Domain()
        self._domains.move_to_end(name)
        cursor = self._cursors.get(sequence)
        if cursor is None:
            cursor = self._cursors[sequence] = _Cursor(domain, 0)
        elif cursor.domain is not domain:
            cursor = self._cursors[sequence] = _Cursor(domain, sequence.num_tokens)
        return cursor

    def _bound(self, current: _Domain) -> None:
        if 2 * current.young.num_tokens > self._max_tokens:
            current.close_generation()
        while self.num_tokens > self._max_tokens:
            if len(self._domains) == 1:
                current.old = SuffixAutomaton()
                return
            self._domains.popitem(last=False)


class _Domain:
    def __init__(self) -> None:
        self.young = SuffixAutomaton()
        self.old = SuffixAutomaton()

    @property
    def num_tokens(self) -> int:
        return self.young.num_tokens + self.old.num_tokens

    def close_generation(self) -> None:
        self.old, self.young = self.young, SuffixAutomaton()


class _Cursor:
    """Where one sequence stands in both generations of its domain."""

    def __init__(self, domain: _Domain, num_tokens: int) -> None:
        self.domain = domain
        self.num_tokens = num_tokens  # of the sequence, taken so far
        self._young, self._old = domain.young, domain.old
        self._state = ROOT  # in the young generation, whose text it is
        self._old_state, self._old_len = ROOT, 0

    def advance(self, token_ids: list[int]) -> None:
        if self._young is not self.domain.young or self._old is not self.domain.old:
            self._young, self._old = self.domain.young, self.domain.old
            self._state, self._old_state, self._old_len = ROOT, ROOT, 0
        for token_id in token_ids:
            self._state = self._young.extend(self._state, token_id)
            self._old_state, self._old_len = self._old.follow(self._old_state, self._old_len, token_id)
        self.num_tokens += len(token_ids)

    def proposals(self, count: int, ahead: Listed[int]) -> list[Proposal]:
        return [
            _continuation(self._young, self._state, self._young.match_len(self._state), count, ahead),
            _continuation(self._old, self._old_state, self._old_len, count, ahead),
        ]


def _continuation(automaton: SuffixAutomaton, state: int, match_len: int, count: int, ahead: Listed[int]) -> Proposal:
    for token_id in ahead:
        state, match_len = automaton.follow(state, match_len, token_id)
    state = automaton.with_continuation(state)
    match_len = min(match_len, automaton.match_len(state))
    token_ids: list[int] = []
    first_share = share = 1.0
    while len(token_ids) < count and state != ROOT:
        token_id, state, its_share = automaton.likeliest(state)
        share *= its_share
        if not token_ids:
            first_share = its_share
        elif share < _LEAST_SHARE:
            break
        token_ids.append(token_id)
        state = automaton.with_continuation(state)
    if not token_ids:
        return NOTHING
    num_lens = sum(match_len >= border for border in _LEN_BORDERS)
    level = 1 + 3 * num_lens + sum(first_share >= border for border in _SHARE_BORDERS)
    return Proposal.graded(token_ids, Grade("text", level))
