"""The rules of beam search by themselves: made-up proposals, no engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.beams import BeamSearch, Branch, common_len
from engine.params import SamplingParams
from engine.plan import Candidate
from engine.sequence import Request

EOS = 9


def search(n: int = 2, **params: Any) -> BeamSearch:
    given = SamplingParams(**{"n": n, "use_beam_search": True, "max_tokens": 8, **params}).validated()
    stops = frozenset(given.stop_token_ids)
    return BeamSearch(Request("r", [1], given, 0, eos_token_ids=frozenset({EOS}), stop_token_ids=stops | {EOS}))


def proposals(**weights: float) -> list[Candidate]:
    """t3=-1.0 is token 3 with weight -1; heaviest first, as a sampler names them."""
    found = [Candidate(int(name[1:]), weight, weight - 1) for name, weight in weights.items()]
    return sorted(found, key=lambda each: (-each.weight, each.token_id))


class Run:
    """A search and the tokens of its beams."""

    def __init__(self, beams: BeamSearch) -> None:
        self.beams = beams
        self.outputs: list[list[int]] = [[]] * beams.width

    def step(self, *each: list[Candidate]) -> list[Branch]:
        for place, candidates in enumerate(each):
            assert not self.beams.is_ready
            self.beams.propose(place, candidates)
        assert self.beams.is_ready
        branches = self.beams.advance(self.outputs)
        self.outputs = [[*self.outputs[branch.parent], branch.token_id] for branch in branches]
        return branches


def test_the_best_of_all_continuations_go_on() -> None:
    run = Run(search())
    assert run.step(proposals(t1=-1.0, t2=-2.0, t3=-3.0)) == [(0, 1), (0, 2)]
    assert run.step(proposals(t1=-3.0, t2=-4.0), proposals(t5=-0.5, t6=-0.6)) == [(1, 5), (1, 6)]
    assert run.outputs == [[2, 5], [2, 6]]


def test_equal_ones_go_by_place_and_then_by_id() -> None:
    run = Run(search())
    run.step(proposals(t1=-1.0, t2=-1.0))
    assert run.step(proposals(t7=-1.0, t4=-1.0), proposals(t1=-1.0)) == [(0, 4), (0, 7)]


def test_an_end_among_the_first_is_a_hypothesis_and_behind_them_it_is_dropped() -> None:
    run = Run(search(n=2))
    assert run.step([*proposals(t9=-1.0), *proposals(t1=-2.0, t2=-3.0)]) == [(0, 1), (0, 2)]
    assert [(each.token_ids, each.finish_reason) for each in run.beams.hypotheses] == [([EOS], "stop")]
    assert run.step(proposals(t3=-0.1), proposals(t4=-0.1, t9=-0.2)) == [(0, 3), (1, 4)]
    assert len(run.beams.hypotheses) == 1


def test_only_so_many_candidates_count() -> None:
    """Width 2 and one stop token: the best four; with another stop token, the best six."""
    assert search(n=2).num_candidates == 4
    assert search(n=2, stop_token_ids=[5]).num_candidates == 6
    assert search(n=1).num_candidates == 2


def test_scores_divide_by_the_length_to_the_power_of_the_penalty() -> None:
    for penalty in (0.5, 2.0, 0.0, -1.0):
        run = Run(search(n=1, max_tokens=3, length_penalty=penalty, early_stopping="never"))
        run.step(proposals(t1=-1.0))
        run.step(proposals(t2=-2.0))
        assert run.step(proposals(t3=-3.0)) == []
        (found,) = run.beams.hypotheses
        assert found.token_ids == [1, 2, 3] and found.finish_reason == "length"
        assert found.score == pytest.approx(-6.0 / 3**penalty)
        assert found.cumulative_logprob == pytest.approx(-9.0)  # of the raw distribution, a nat less for each token


def test_no_penalty_makes_a_score_that_is_no_number() -> None:
    for penalty in (100.0, -100.0):
        run = Run(search(n=1, max_tokens=5000, length_penalty=penalty, early_stopping=True))
        for _ in range(4999):
            run.step(proposals(t1=-1.0))
        run.step(proposals(t9=-1.0))
        assert math.isfinite(run.beams.hypotheses[0].score)


@pytest.mark.parametrize(
    ("early_stopping", "weight", "is_over"),
    [
        (True, -1.0, True), (True, -7.0, True),
        (False, -1.0, False), (False, -7.0, True),
        ("never", -1.0, False), ("never", -7.0, False), ("never", -24.0, True),
    ],
)  # fmt: skip
def test_the_three_ways_to_stop(early_stopping: Any, weight: float, is_over: bool) -> None:
    """Hypotheses of -0.55 and -3; the best beam weighs a nat more than `weight`, and may grow from 2 to 8 tokens."""
    run = Run(search(n=2, early_stopping=early_stopping, length_penalty=1.0))
    run.step(proposals(t1=-1.0, t9=-3.0, t2=-30.0))
    assert (run.step(proposals(t9=-0.1, t3=weight), proposals(t4=-30.0)) == []) is is_over
    assert [each.score for each in run.beams.hypotheses] == pytest.approx([-0.55, -3.0])


def test_without_a_penalty_no_growth_can_help() -> None:
    run = Run(search(n=1, early_stopping="never", length_penalty=0.0))
    run.step(proposals(t1=-1.0))
    assert run.step(proposals(t9=-0.5, t2=-0.6)) == []


@pytest.mark.parametrize(("weight", "is_over"), [(-1.0, False), (-3.0, True)])
def test_where_length_costs_the_present_one_suits_best(weight: float, is_over: bool) -> None:
    """Hypotheses of -2.2 and -3 with a penalty of -1: the best beam would be at -2.2, or at -6.2, if it ended now."""
    run = Run(search(n=2, early_stopping="never", length_penalty=-1.0))
    run.step(proposals(t1=-0.1, t9=-3.0, t2=-30.0))
    over = run.step(proposals(t9=-1.0, t3=weight), proposals(t4=-30.0)) == []
    assert [each.score for each in run.beams.hypotheses] == pytest.approx([-2.2, -3.0])
    assert over is is_over


def test_nothing_ends_before_min_tokens() -> None:
    run = Run(search(n=1, min_tokens=3))
    run.step(proposals(t9=-0.1, t1=-3.0))
    assert run.outputs == [[EOS]] and not run.beams.hypotheses  # a sampler would not have named it


def test_stop_tokens_name_themselves() -> None:
    run = Run(search(n=1, stop_token_ids=[4], early_stopping=True))
    run.step(proposals(t4=-0.1, t1=-3.0))
    (found,) = run.beams.hypotheses
    assert (found.finish_reason, found.stop_reason) == ("stop", 4)


def test_places_without_a_beam_run_along_and_propose_nothing() -> None:
    run = Run(search(n=3))
    assert run.step(proposals(t1=-1.0, t2=-2.0, t3=-math.inf)) == [(0, 1), (0, 2), (0, 1)]
    heavy = proposals(t7=0.0)
    assert run.step(proposals(t4=-5.0), proposals(t5=-5.0), heavy) == [(0, 4), (1, 5), (0, 4)]


def test_where_nothing_is_left_it_is_over() -> None:
    run = Run(search(n=2))
    assert run.step(proposals(t1=-math.inf)) == []
    assert run.beams.hypotheses == []


def test_beams_that_lost_their_blocks_propose_anew() -> None:
    run = Run(search(n=2))
    run.step(proposals(t1=-1.0, t2=-1.5))
    run.step(proposals(t3=-1.0, t4=-2.0), proposals(t5=-9.0))
    run.beams.propose(0, proposals(t1=-1.0))
    run.beams.gather(run.outputs)
    assert run.beams.num_common_tokens == 1  # [1, 3] and [1, 4]
    run.beams.propose(1, proposals(t7=-9.0))
    assert not run.beams.is_ready
    run.beams.gather(run.outputs)
    assert run.step(proposals(t6=-1.0), proposals(t7=-1.0)) == [(0, 6), (1, 7)]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[1], [1]], 1),
        ([[2], [1]], 0),
        ([[], []], 0),
        ([[1, 5, 1], [1, 4, 1], [1, 5, 2]], 1),
    ],
)
def test_what_beams_have_in_common(lists: list[list[int]], expected: int) -> None:
    assert common_len(lists) == expected
