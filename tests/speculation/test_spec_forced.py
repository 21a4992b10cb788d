"""What a grammar forces is proposed and always right; guesses behind it are within the grammar; no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import LoadedModel
from engine.guided.compiler import GrammarCompiler
from engine.guided.matcher import GrammarMatcher
from engine.params import Guided, SamplingParams
from engine.sequence import Request, Sequence
from engine.speculation.depth import DepthChooser
from engine.speculation.forced import ForcedFirst
from engine.speculation.ngram import NgramProposer
from engine.speculation.suffix import SuffixProposer
from tests.cases.trial import Trial, prompt_of

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["mammal", "mineral"]},
        "legs": {"type": "array", "items": {"enum": [1, 22]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}  # fmt: skip
KINDS: dict[str, Guided] = {
    "json": Guided(json=RECORD),
    "choice": Guided(choice=["a longer answer", "a longer question", "another", "日本"]),
    "regex": Guided(regex="[ab]{2,6}(xyzxyzxyz|yz)"),
    "sentences": Guided(grammar='start: s " " s\ns: "The first is long." | "The second is longer." | "No."'),
}


def matcher_of(loaded: LoadedModel, kind: str) -> GrammarMatcher:
    return GrammarCompiler(loaded.tokenizer, loaded.info.vocab_size).compile(KINDS[kind])


def sequence_of(prompt: list[int], output: list[int], matcher: GrammarMatcher | None = None) -> Sequence:
    request = Request("r", prompt, SamplingParams(), 0)
    request.sequences = [Sequence(request, 0, 0, output, matcher=matcher)]
    return request.sequences[0]


# ---- the grammar


def test_certain_tokens_are_the_only_ones_allowed_and_guesses_are_allowed(tiny: LoadedModel, real: LoadedModel) -> None:
    for loaded in (tiny, real):
        matcher = matcher_of(loaded, "json")
        text = '{"name": "Ann", "kind": "mammal", "legs": [1, 22]}'
        written = loaded.tokenizer.encode(text, add_special_tokens=False)
        num_certain = 0
        for count in range(len(written)):
            token_ids, certain = matcher.forced_after(written[:count], 40)
            for place, token_id in enumerate(token_ids):
                before = written[:count] + token_ids[:place]
                allowed = matcher.allowed_after(before).nonzero()[0].tolist()
                assert token_id in allowed
                assert place >= certain or allowed == [token_id]
            num_certain = max(num_certain, certain)
        assert num_certain >= 3


def test_nothing_is_forced_behind_tokens_that_the_grammar_does_not_know(tiny: LoadedModel) -> None:
    matcher = matcher_of(tiny, "json")
    wrong = tiny.tokenizer.encode("[1", add_special_tokens=False)
    assert matcher.forced_after(wrong, 9) == ([], 0)
    assert matcher.num_allowed(wrong, [5, 6]) == 0
    right = tiny.tokenizer.encode('{"na', add_special_tokens=False)
    assert matcher.forced_after(right, 9)[1] > 0  # it finds its way back
    assert matcher.num_allowed(right, tiny.tokenizer.encode("me 1", add_special_tokens=False)) == 2


def test_a_long_text_is_known_on_the_way_and_only_on_the_way(tiny: LoadedModel) -> None:
    def encode(text: str) -> list[int]:
        return tiny.tokenizer.encode(text, add_special_tokens=False)

    text = "b" + "abcdefghij" * 9
    compiler = GrammarCompiler(tiny.tokenizer, tiny.info.vocab_size)
    matcher = compiler.compile(Guided(choice=[f"a{text}", f"c{text}", "another"]))
    for beginning in ("a", "c"):
        for num_gone in (0, 1, 2, 7, 40, 60, 85, 89, 91):
            written = encode(beginning + text[:num_gone])
            expected = compiler.compile(Guided(choice=[f"a{text}", f"c{text}", "another"])).forced_after(written, 10)
            assert matcher.forced_after(written, 10) == expected
    assert matcher.forced_after(encode("an"), 10) == (encode("other"), len(encode("other")))


def test_tokens_that_the_model_has_no_row_for_are_never_forced_and_break_nothing(tiny: LoadedModel) -> None:
    """A tokenizer may know more tokens than its model; a client's text may hold them."""
    [foreign] = tiny.tokenizer.encode("x", add_special_tokens=False)
    before = tiny.tokenizer.encode("AB", add_special_tokens=False)
    assert max(before) < foreign
    matcher = GrammarCompiler(tiny.tokenizer, foreign).compile(Guided(choice=["ABxCD", "ABxEF"]))
    assert matcher.forced_after([], 9) == (before, 2)
    assert matcher.forced_after(before, 9) == ([], 0)
    assert matcher.num_allowed([], [*before, foreign, 10**6]) == 2
    assert matcher.num_allowed([], [10**6]) == 0 and matcher.error is None


def test_a_guess_that_fails_the_matcher_hurts_nothing_that_is_asked_later(tiny: LoadedModel) -> None:
    matcher = matcher_of(tiny, "json")
    allowed = matcher.allowed_after([]).copy()
    assert len(matcher.allowed_after([10**6])) == 0  # llguidance's own state is of no more use
    assert matcher.error is not None
    assert matcher.allowed_after([]).tolist() == allowed.tolist()
    assert matcher.forced_after([], 9)[1] > 0


# ---- proposers


@pytest.mark.parametrize("proposer", [NgramProposer, SuffixProposer])
def test_what_a_proposer_says_follows_what_is_ahead(proposer: Any) -> None:
    sequence = sequence_of([1, 2, 3, 4, 5, 9, 8], [7])
    assert proposer().propose(sequence, 3).token_ids == []
    assert proposer().propose(sequence, 2, [2, 3]).token_ids == [4, 5]
    assert proposer().propose(sequence, 2, [6, 6]).token_ids == []


def test_lookup_goes_round_over_what_is_ahead() -> None:
    assert NgramProposer().propose(sequence_of([1, 2, 3], [1]), 5, [2]).token_ids == [3, 1, 2, 3, 1]


def test_forced_tokens_come_first_and_a_guess_stays_within_the_grammar(tiny: LoadedModel) -> None:
    def encode(text: str) -> list[int]:
        return tiny.tokenizer.encode(text, add_special_tokens=False)

    proposer = ForcedFirst(NgramProposer())
    prompt = encode('as in {"name": "Ann", "kind": "mammoth"}: ')
    proposal, _ = proposer.propose(sequence_of(prompt, encode("{"), matcher_of(tiny, "json")), 40)
    text = tiny.tokenizer.decode(proposal.token_ids)
    assert text == '"name": "Ann", "kind": "mamm'  # a mammoth is no kind
    assert tiny.tokenizer.decode(proposal.token_ids[: proposal.num_certain]).startswith('"name":')
    few, _ = proposer.propose(sequence_of(prompt, encode("{"), matcher_of(tiny, "json")), 2)
    assert (few.token_ids, few.num_certain) == (proposal.token_ids[:2], 2)
    [free] = proposer.propose(sequence_of(prompt, encode("{")), 40)
    assert free.num_certain == 0 and tiny.tokenizer.decode(free.token_ids).startswith('"name": "Ann", "kind": "mammoth')


def test_certain_proposals_are_taken_before_likely_ones() -> None:
    seconds = [1.0, 1.0, 1.0, 1.0, 9.0, 9.0]
    likely, certain = [0.9, 0.81, 0.73], [1.0, 1.0, 1.0, 0.3]
    assert DepthChooser().choose([likely, certain], 10, seconds, 0.0) == [0, 3]


def test_what_is_implied_is_verified_with_what_implies_it() -> None:
    cheap = [1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3]
    assert DepthChooser().choose([[0.5**place for place in range(1, 7)]], 6, cheap, 0.0) == [3]
    assert DepthChooser().choose([[0.5] * 6], 6, cheap, 0.0) == [6]


# ---- in the engine


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
@pytest.mark.parametrize("more", [{}, {"num_kv_blocks": 16, "num_host_slots": 64}, {"speculative_adaptive": True}])
def test_no_token_changes(tiny: LoadedModel, tiny_folder: Path, proposer: str, more: dict[str, Any]) -> None:
    """Greedy and sampled, several choices, beside others that are free, in a pool that is too small for all."""
    settings = {"speculative_adaptive": False, "max_num_batched_tokens": 64, **more}
    trial = Trial(tiny, folder=tiny_folder, speculative=proposer, **settings)
    for index, (kind, guided) in enumerate(KINDS.items()):
        asked = {"guided": guided, "ignore_eos": False, "max_tokens": 90, "seed": index, "logprobs": 2}
        trial.add(f"greedy {kind}", prompt_of(10 + index), temperature=0.0, **asked)
        trial.add(f"sampled {kind}", prompt_of(20 + index), temperature=1.3, n=1 + index % 2, **asked)
        trial.add(f"free {kind}", prompt_of(30 + index), temperature=float(index % 2), max_tokens=40)
    trial.run()
    assert trial.llm.stats().num_accepted_tokens > 0
    trial.assert_all_as_alone()


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
def test_steps_are_spared_from_the_first_token_on(tiny: LoadedModel, tiny_folder: Path, proposer: str) -> None:
    """Nothing in the prompt helps: every proposal comes from the grammar, and nearly all are right."""
    trial = Trial(tiny, folder=tiny_folder, speculative=proposer, speculative_adaptive=False)
    choices = ["a" + "bcdefghijklmnopqrstuvwxyz" * 2, "Z" + "YXWVUTSRQPONMLKJIHGFEDCBA" * 2]
    output = trial.ask([5, 6, 7], guided=Guided(choice=choices), ignore_eos=False, max_tokens=90, temperature=0.0)
    assert output.choices[0].text in choices
    stats = trial.llm.stats()
    assert stats.num_accepted_tokens >= 0.9 * stats.num_drafted_tokens > 0
    assert stats.num_steps <= 2 + len(output.choices[0].token_ids) / 8
    trial.assert_all_as_alone()


def test_parameters_that_contradict_the_grammar_are_obeyed(tiny: LoadedModel, tiny_folder: Path) -> None:
    """min_tokens, stops and forbidden words inside what is forced end or fail it there, as without speculation."""
    trial = Trial(tiny, folder=tiny_folder, speculative="ngram", speculative_adaptive=False)
    guided = Guided(choice=["the only answer there is"])
    asked = {"guided": guided, "ignore_eos": False, "max_tokens": 60, "temperature": 0.0}
    trial.add("stopped", prompt_of(9), stop=["answer"], **asked)
    trial.add("short", prompt_of(9), **{**asked, "max_tokens": 7})
    trial.add("long", prompt_of(9), min_tokens=50, **asked)
    trial.add("forbidden", prompt_of(9), bad_words=["answer"], **asked)
    trial.run()
    assert trial.output("stopped").choices[0].text == "the only "
    assert trial.output("short").choices[0].finish_reason == "length"
    assert trial.output("long").choices[0].finish_reason == "error"
    assert trial.output("forbidden").choices[0].finish_reason == "error"
    trial.assert_all_as_alone()
