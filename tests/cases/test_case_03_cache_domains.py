"""vLLM #44701, PR #12621: the same string as an adapter's name and as a tenant's salt shares cached prefixes.

Kind: a key that runs together. Siblings: strings that join to the same text, separators inside them, salts beside
empty ones, salt and adapter swapped, the host's second tier, prefixes registered by outputs, swapped blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.prefix_cache import _root
from tests.cases.trial import BLOCK, Trial, prompt_of

DOMAINS: list[dict[str, Any]] = [
    {},
    {"salt": "x"},
    {"adapter": "x"},
    {"salt": "x", "adapter": "x"},
    {"salt": "xx"},
    {"salt": "x\0"},
    {"salt": "\0x"},
    {"salt": "", "adapter": "xx"},
    {"salt": "ab", "adapter": "c"},
    {"salt": "a", "adapter": "bc"},
    {"salt": "é"},
    {"salt": "e\u0301"},
]


def test_no_tokens_are_shared_across_domains(trial: Callable[..., Trial]) -> None:
    engine = trial(num_kv_blocks=512)
    prompt = prompt_of(5 * BLOCK)
    for domain in DOMAINS:
        assert engine.ask(prompt, max_tokens=2, **domain).num_cached_tokens == 0, domain
        assert engine.ask(prompt, max_tokens=2, **domain).num_cached_tokens == 4 * BLOCK, domain
    engine.assert_all_as_alone()


@given(texts=st.lists(st.text(max_size=4), min_size=2, max_size=3))
@settings(max_examples=50, deadline=None)
def test_every_pair_of_texts_is_a_domain_of_its_own(texts: list[str]) -> None:
    pairs = set(permutations(texts, 2))
    assert len({_root(*pair) for pair in pairs}) == len(pairs)


def test_equal_blocks_behind_other_beginnings_are_not_shared(trial: Callable[..., Trial]) -> None:
    """A block's KV depends on all before it: the same tokens at the same place are other content."""
    engine = trial()
    same = prompt_of(3 * BLOCK)
    for index in range(3):
        assert engine.ask([*prompt_of(BLOCK, seed=index + 1), *same], max_tokens=4, logprobs=1).num_cached_tokens == 0
    assert engine.ask(same, max_tokens=4).num_cached_tokens == 0
    engine.assert_all_as_alone()


def test_a_tenant_is_no_domain(trial: Callable[..., Trial]) -> None:
    """`tenant` is for fairness; whoever keeps tenants apart gives each a salt."""
    engine = trial()
    assert engine.ask(prompt_of(20), max_tokens=1, tenant="a").num_cached_tokens == 0
    assert engine.ask(prompt_of(20), max_tokens=1, tenant="b").num_cached_tokens == 2 * BLOCK


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_domains_stay_apart_in_a_small_pool_with_a_second_tier(trial: Callable[..., Trial], mode: str) -> None:
    """Equal prompts of two domains and of different outputs, preempted, swapped and evicted: equal content is still
    computed, found and brought back for each domain on its own."""
    engine = trial(num_kv_blocks=14, num_host_slots=40, enable_host_prefix_cache=True, preemption_mode=mode)
    for index in range(8):
        domain = DOMAINS[1 + index % 2]
        engine.add(f"r{index}", prompt_of(20), max_tokens=24, seed=index, **domain)
        engine.step()
    engine.run()
    stats = engine.llm.stats()
    assert stats.num_preempted_swap + stats.num_preempted_recompute > 0
    assert engine.output("r0").num_cached_tokens == engine.output("r1").num_cached_tokens == 0
    engine.assert_all_as_alone()
