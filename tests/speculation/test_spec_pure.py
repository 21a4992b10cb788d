"""The pure parts of speculation: what is proposed, what is accepted, how deep a step goes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.costs import StepCosts, StepSize
from engine.params import SamplingParams
from engine.plan import Row, Sampled
from engine.sequence import Request, Sequence
from engine.speculation.accept import num_accepted
from engine.speculation.acceptance_rates import AcceptanceRates
from engine.speculation.counts import SpeculationCounts
from engine.speculation.decode_curve import DecodeCurve
from engine.speculation.depth import DepthChooser
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposal import Grade, Proposal
from engine.speculation.speculator import Speculator
from engine.speculation.suffix import SuffixProposer
from engine.speculation.suffix_automaton import ROOT, SuffixAutomaton


def sequence_of(prompt: list[int], output: list[int] | None = None, *, salt: str = "") -> Sequence:
    request = Request("r", prompt, SamplingParams(), 0, salt=salt)
    request.sequences = [Sequence(request, 0, 0, list(output or []))]
    return request.sequences[0]


# ---- acceptance


@pytest.mark.parametrize(
    ("proposals", "targets", "expected"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 9, 7, 8], 1),
        ([5, 6, 7], [4, 6, 7, 8], 0),
        ([5, 6, 7], [5, None, 7, 8], 1),
        ([], [5], 0),
    ],
)
def test_proposals_are_accepted_up_to_the_first_that_the_target_would_not_draw(
    proposals: list[int], targets: list[int | None], expected: int
) -> None:
    assert num_accepted(proposals, [Sampled(token_id) for token_id in targets]) == expected


# ---- prompt lookup


def test_the_longest_earlier_match_is_continued() -> None:
    sequence = sequence_of([1, 2, 3, 40, 9, 2, 3, 50, 8, 1, 2, 3])
    proposal = NgramProposer().propose(sequence, 3)
    assert proposal.token_ids == [40, 9, 2]  # 1 2 3, not the newer 2 3
    assert proposal.grades == [Grade("text", 3)] * 3


def test_of_equally_long_matches_the_newest_is_continued() -> None:
    assert NgramProposer().propose(sequence_of([7, 8, 1, 5, 7, 8, 2, 6, 7, 8]), 1).token_ids == [2]


def test_where_no_pair_matches_what_followed_the_last_token_newest_is_continued() -> None:
    proposal = NgramProposer().propose(sequence_of([5, 1, 2, 5, 3, 4, 5]), 2)
    assert proposal == Proposal.graded([3, 4], Grade("text", 1))


def test_output_is_looked_up_as_it_grows() -> None:
    proposer, sequence = NgramProposer(), sequence_of([1, 2])
    assert proposer.propose(sequence, 4).token_ids == []
    for token_id, expected in ((3, []), (1, [2, 3, 1, 2]), (2, [3, 1, 2, 3]), (3, [1, 2, 3, 1])):
        sequence.output_token_ids.append(token_id)
        assert proposer.propose(sequence, 4).token_ids == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 5))
def test_whatever_lookup_proposes_did_follow_the_match(tokens: list[int], count: int) -> None:
    """Against a search that looks at every place: no longer match exists within the newest few, and it is continued."""
    token_ids, grades = NgramProposer().propose(sequence_of(tokens), count)
    ends = {end for end in range(2, len(tokens)) if tokens[end - 2 : end] == tokens[-2:]}
    newest = sorted(ends)[-16:] or [end for end in range(1, len(tokens)) if tokens[end - 1] == tokens[-1]][-1:]
    if not newest:
        assert token_ids == []
        return
    lens = {end: _common_suffix(tokens[:end], tokens) for end in newest}
    longest = min(16, max(lens.values()))
    assert grades == [Grade("text", longest)] * len(token_ids)
    place = max(end for end in newest if min(16, lens[end]) == longest)
    wrapped = tokens[place:] * count
    assert token_ids == wrapped[:count]


def _common_suffix(left: list[int], right: list[int]) -> int:
    count = 0
    while count < len(left) and left[-count - 1] == right[-count - 1]:
        count += 1
    return count


# ---- suffix automaton


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4), st.randoms())
def test_automaton_knows_every_substring_and_how_often_it_occurred(
    texts: list[list[int]], chance: random.Random
) -> None:
    """Texts are extended in turns, as running sequences are."""
    automaton = SuffixAutomaton()
    states = [ROOT] * len(texts)
    places = [0] * len(texts)
    while any(place < len(text) for place, text in zip(places, texts, strict=True)):
        index = chance.choice([i for i, text in enumerate(texts) if places[i] < len(text)])
        states[index] = automaton.extend(states[index], texts[index][places[index]])
        places[index] += 1
    assert automaton.num_tokens == sum(map(len, texts))
    assert automaton.num_states <= 2 * automaton.num_tokens + 1
    occurrences = Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    )
    for words in occurrences:
        state, match_len = ROOT, 0
        for token_id in words:
            state, match_len = automaton.follow(state, match_len, token_id)
        assert match_len == len(words)
        following = {
            token_id: occurrences[(*words, token_id)] for token_id in range(3) if (*words, token_id) in occurrences
        }
        if following:
            assert automaton.with_continuation(state) == state
            token_id, _, share = automaton.likeliest(state)
            assert following[token_id] == max(following.values())
            assert share == pytest.approx(following[token_id] / sum(following.values()))
    for text, state in zip(texts, states, strict=True):
        assert automaton.match_len(state) == len(text)
    state, match_len = ROOT, 0
    for token_id in (9, 9):
        assert automaton.follow(state, match_len, token_id) == (ROOT, 0)


# ---- suffixes


def test_what_followed_most_often_is_proposed() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 4, 8, 1, 2]
    assert SuffixProposer().propose(sequence_of(tokens), 2).token_ids == [4, 8]  # the lower of equals


def test_earlier_outputs_help_later_ones_under_the_same_salt_only() -> None:
    proposer = SuffixProposer()
    first = sequence_of([1, 2, 3], [7, 8, 9, 6], salt="a")
    proposer.propose(first, 4)
    assert proposer.propose(sequence_of([1, 2, 3], salt="a"), 4).token_ids == [7, 8, 9, 6]
    assert proposer.propose(sequence_of([1, 2, 3], salt="b"), 4).token_ids == []


def test_two_that_grow_in_turns_learn_from_each_other() -> None:
    proposer = SuffixProposer()
    one, other = sequence_of([1, 2]), sequence_of([1, 2])
    for token_id in (5, 6, 7):
        one.output_token_ids.append(token_id)
        proposer.propose(one, 3)
        assert proposer.propose(other, 1).token_ids == [token_id]
        other.output_token_ids.append(token_id)


def test_memory_is_bounded_and_old_text_is_forgotten() -> None:
    proposer = SuffixProposer(max_tokens=400)
    for index in range(60):
        tokens = [1000 * index + place for place in range(30)]
        proposer.propose(sequence_of(tokens, salt=str(index % 3)), 4)
        assert proposer.num_tokens <= 400
    recent, ancient = 59, 0
    assert proposer.propose(sequence_of([59_000, 59_001], salt=str(recent % 3)), 2).token_ids == [59_002, 59_003]
    assert proposer.propose(sequence_of([0, 1], salt=str(ancient % 3)), 2).token_ids == []


def test_a_text_longer_than_the_bound_is_still_served() -> None:
    proposer, sequence = SuffixProposer(max_tokens=50), sequence_of(list(range(200)))
    proposer.propose(sequence, 3)
    sequence.output_token_ids += [5, 6, 7, 5, 6]
    proposer.propose(sequence, 3)
    sequence.output_token_ids += [7, 5, 6]
    assert proposer.propose(sequence, 2).token_ids[:1] == [7]
    assert proposer.num_tokens <= 50


# ---- how deep


def gains(count: int, rate: float) -> list[float]:
    return [rate**place for place in range(1, count + 1)]


def flat(seconds: float, count: int = 60) -> list[float]:
    return [seconds] * count


def test_free_verification_takes_all_and_dear_verification_none() -> None:
    offers = [gains(5, 0.8), gains(3, 0.5)]
    assert DepthChooser().choose(offers, 8, flat(1.0), 0.0) == [5, 3]
    dear = [1.0 + 0.9 * place for place in range(9)]
    assert DepthChooser().choose(offers, 8, dear, 0.0) == [0, 0]


def test_the_likeliest_proposals_of_the_batch_are_taken() -> None:
    seconds = [1.0, 1.0, 1.0, 1.0, 9.0, 9.0]
    assert DepthChooser().choose([gains(5, 0.9), gains(5, 0.3), gains(0, 0.9)], 10, seconds, 0.0) == [3, 0, 0]


def test_no_more_than_the_budget() -> None:
    assert sum(DepthChooser().choose([gains(5, 0.9)] * 4, 7, flat(1.0), 0.0)) == 7


def test_drafting_time_is_counted_by_the_deepest() -> None:
    """Draft 2 ms, target 50 ms, acceptance 0.7: five pay. With drafts of 40 ms none do."""
    assert DepthChooser().choose([gains(5, 0.7)], 5, flat(0.05), 0.002) == [5]
    assert DepthChooser().choose([gains(5, 0.7)], 5, flat(0.05), 0.04) == [0]


def test_speculation_that_barely_pays_is_kept_and_not_begun() -> None:
    chooser = DepthChooser()
    barely = [1.0, 1.47]  # 1.5 tokens in 1.47 steps
    assert chooser.choose([gains(1, 0.5)], 1, barely, 0.0) == [0]
    assert chooser.choose([gains(1, 0.8)], 1, barely, 0.0) == [1]
    assert chooser.choose([gains(1, 0.5)], 1, barely, 0.0) == [1]
    assert chooser.choose([gains(1, 0.4)], 1, barely, 0.0) == [0]
    assert chooser.choose([gains(1, 0.5)], 1, barely, 0.0) == [0]


def test_rates_follow_a_sequence_and_start_from_its_grade() -> None:
    rates = AcceptanceRates()
    good, bad, new = (sequence_of([1]) for _ in range(3))
    for _ in range(50):
        rates.observe(good, Grade("text", 3), num_right=3, has_wrong=False)
        rates.observe(bad, Grade("text", 2), num_right=0, has_wrong=True)
    assert rates.rate(good, Grade("text", 3)) > 0.95
    assert rates.rate(bad, Grade("text", 2)) < 0.05
    assert rates.rate(new, Grade("text", 3)) > 0.9
    assert rates.rate(new, Grade("text", 2)) < 0.1
    assert (
        rates.rate(new, Grade("value", 3)) == rates.rate(bad, Grade("value", 2)) == 0.6
    )  # another source is another matter
    for _ in range(20):
        rates.observe(bad, Grade("text", 2), num_right=1, has_wrong=False)
    assert rates.rate(bad, Grade("text", 2)) > 0.5


def test_costs_between_two_measurements_are_linear_and_hopeful_a_little_beyond() -> None:
    curve = DecodeCurve()
    assert curve.estimates(1, 3) == []
    curve.observe(1, 1, 1.0)
    assert curve.estimates(1, 9) == pytest.approx([1.0, 1.25, 1.5])
    curve.observe(1, 5, 2.0)
    assert curve.estimates(1, 9) == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0, 2.125, 2.25])
    assert curve.estimates(8, 9) == []  # another number of sequences
    curve.observe(32, 32, 1.0)
    assert len(curve.estimates(32, 192)) == 9


def test_beyond_what_is_measured_a_token_costs_as_much_as_one_of_prefill_but_no_more_than_so_far() -> None:
    curve = DecodeCurve()
    curve.observe(1, 1, 1.0)
    assert curve.estimates(1, 9, 0.1) == pytest.approx([1.0 + 0.1 * more for more in range(9)])
    assert curve.estimates(1, 9, 0.6) == curve.estimates(1, 9)  # a short prompt's step is mostly fixed cost
    curve.observe(1, 3, 1.1)
    assert curve.estimates(1, 9, 0.1) == curve.estimates(1, 9) == pytest.approx([1.0, 1.05, 1.1, 1.125, 1.15])


def test_a_hiccup_is_no_cost_and_what_is_old_is_measured_anew() -> None:
    curve = DecodeCurve()
    for _ in range(10):
        curve.observe(1, 2, 1.0)
    curve.observe(1, 2, 100.0)
    assert curve.estimates(1, 2) == pytest.approx([1.2, 1.2])
    for _ in range(600):
        curve.observe(1, 1, 0.5)
    assert curve.estimates(1, 2) == pytest.approx([0.5, 0.625])


def test_counts_by_place() -> None:
    counts = SpeculationCounts(3)
    counts.add(num_drafted=3, num_accepted=1, num_drawn=2)
    counts.add(num_drafted=1, num_accepted=1, num_drawn=2)
    assert (counts.num_drafted, counts.num_accepted, counts.num_rows, counts.num_drawn) == (4, 2, 2, 4)
    assert counts.acceptance_by_position == (1.0, 0.0, 0.0)


class Rivals:
    """Says one thing as text and another, behind whose first token the others are implied, as a value."""

    def __init__(self, text: list[int], value: list[int]) -> None:
        implied = Proposal.graded(value[1:], None)
        self._rivals = [
            Proposal.graded(text, Grade("text", 1)), Proposal.graded(value[:1], Grade("value", 1)) + implied
        ]  # fmt: skip

    def propose(self, sequence: Sequence, count: int) -> list[Proposal]:
        return [each.first(count) for each in self._rivals]


@pytest.mark.parametrize(("came", "taken"), [([1, 2, 3], [1, 2, 3]), ([7, 8, 9], [7, 8, 9]), ([4, 5, 6], [7, 8, 9])])
def test_of_two_proposals_the_one_that_is_right_more_often_is_verified(came: list[int], taken: list[int]) -> None:
    """Both are judged by what came. Where both are wrong, the one that would bring more."""
    config = EngineConfig(speculative="ngram", speculative_adaptive=False, num_speculative_tokens=3)
    speculator = Speculator(config, StepCosts())
    speculator._proposer = Rivals([1, 2, 3], [7, 8, 9])  # type: ignore[assignment]
    sequence = sequence_of([5])
    row = Row(sequence, 0, [5], [0], 1)
    assert speculator.propose([row], 9) == [[7, 8, 9]]  # nothing is known: the rest of it is implied
    for _ in range(8):
        sequence.output_token_ids += came
        [found] = speculator.propose([row], 9)
    assert found == taken
    text, value = (speculator._rates.rate(sequence, Grade(source, 1)) for source in ("text", "value"))
    assert (text > 0.6) == (came == [1, 2, 3]) and (value > 0.6) == (came == [7, 8, 9])


def test_what_is_implied_is_judged_with_what_implies_it() -> None:
    speculator = Speculator(EngineConfig(speculative="ngram", speculative_adaptive=False), StepCosts())
    speculator._proposer = Rivals([], [7, 8, 9])  # type: ignore[assignment]
    sequence = sequence_of([5])
    for _ in range(5):
        speculator.propose([Row(sequence, 0, [5], [0], 1)], 9)
        sequence.output_token_ids += [7, 4]
    assert speculator._rates.rate(sequence, Grade("value", 1)) < 0.4


def test_each_token_is_judged_by_its_own_grade_up_to_the_first_wrong_one() -> None:
    speculator = Speculator(EngineConfig(speculative="ngram", speculative_adaptive=False), StepCosts())
    good, bad, unseen = Grade("good"), Grade("bad"), Grade("unseen")
    mixed = Proposal([1, 2, 3, 4, 5], [good, None, good, bad, unseen])
    sequence = sequence_of([5])
    for _ in range(9):
        speculator._judge(sequence, mixed, [1, 2, 3, 9, 5])
    rates = [speculator._rates.rate(sequence, grade) for grade in (good, bad, unseen)]
    assert rates[0] > 0.9 and rates[1] < 0.2 and rates[2] == 0.6
    found = speculator._gains(sequence, mixed)
    assert found == pytest.approx([rates[0], rates[0], rates[0] ** 2, rates[0] ** 2 * rates[1],
                                   rates[0] ** 2 * rates[1] * rates[2]])  # fmt: skip


def test_a_token_is_as_good_as_what_it_implies() -> None:
    """A record may go another way than the last: what was implied is not certain, and its gain learns that."""
    speculator = Speculator(EngineConfig(speculative="ngram", speculative_adaptive=False), StepCosts())
    certain, end = Proposal.graded([1, 2], None), Proposal.implying([3, 4, 5], Grade("end"))
    sequence = sequence_of([5])
    for came, expected in (([1, 2, 3, 4, 9], 0.0), ([1, 2, 3, 4, 5], 1.0), ([1, 9], 1.0), ([1, 2, 3], 1.0)):
        speculator._rates = AcceptanceRates()
        for _ in range(200):
            speculator._judge(sequence, certain + end, came)
        found = speculator._rates.rate(sequence, Grade("end"))
        assert found == (0.6 if came == [1, 9] else pytest.approx(expected, abs=0.05))


@pytest.mark.parametrize(("proposer", "expected"), [("draft", 4), ("ngram", 32)])
def test_a_model_that_is_not_worth_asking_is_left_alone_for_some_steps(proposer: str, expected: int) -> None:
    """What came says how good other guesses are, so these are made at each step."""
    costs = StepCosts()
    costs.observe(StepSize(0, num_decoding=1, num_drawn=1), 1.0)
    costs.observe(StepSize(0, num_decoding=1, num_proposals=1, num_drawn=1, draft_depth=1), 6.0, draft_seconds=5.0)
    model = "another" if proposer == "draft" else None
    speculator = Speculator(EngineConfig(speculative=proposer, speculative_model=model), costs)
    num_weighed = 0
    inner = speculator._likeliest

    def counted(sequence: Sequence) -> tuple[Proposal, list[float]]:
        nonlocal num_weighed
        num_weighed += 1
        return inner(sequence)

    speculator._likeliest = counted  # type: ignore[method-assign]
    sequence = sequence_of([5, 6, 5])
    for _ in range(32):
        [found] = speculator.propose([Row(sequence, 0, [5], [0], 1)], 9)
        assert proposer == "ngram" or not found
        sequence.output_token_ids.append(7)
    assert num_weighed == expected


def test_a_model_that_was_wrong_is_asked_again_after_32_steps_and_then_ever_later() -> None:
    """Steps that it is left alone for count as well."""
    costs = StepCosts()
    for num_tokens in (1, 2):
        size = StepSize(0, num_decoding=1, num_proposals=num_tokens - 1, num_drawn=1, draft_depth=num_tokens - 1)
        costs.observe(size, 1.0 + 0.1 * num_tokens, draft_seconds=0.01 * (num_tokens - 1))
    speculator = Speculator(EngineConfig(speculative="draft", speculative_model="another"), costs)
    sequence = sequence_of([5])
    for _ in range(200):
        speculator._rates.observe(sequence, Grade("model"), num_right=0, has_wrong=True)
    asked = [step for step in range(200) if speculator.propose([Row(sequence, 0, [5], [0], 1)], 9) != [[]]]
    assert asked == [32, 32 + 1 + 64]
