"""The hash chain, and what the cache finds and spares."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockPool
from engine.host_store import HostStore
from engine.params import SamplingParams
from engine.prefix_cache import PrefixCache
from engine.sequence import Request, Sequence
from tests.engine.engine_harness import Harness, alone

BLOCK = 8


def sequence(prompt: list[int], *, salt: str = "", adapter: str = "") -> Sequence:
    request = Request("r", prompt, SamplingParams(), 0, salt=salt, adapter=adapter)
    request.sequences.append(Sequence(request, 0, 0))
    return request.sequences[0]


def hashes(prompt: list[int], **domain: str) -> list[bytes]:
    cache = PrefixCache(BlockPool(1, BLOCK), HostStore(0), enabled=True, second_tier=False)
    return cache.hashes(sequence(prompt, **domain), len(prompt) // BLOCK)


@given(a=st.lists(st.integers(0, 2), max_size=40), b=st.lists(st.integers(0, 2), max_size=40))
@settings(max_examples=200)
def test_hashes_are_equal_exactly_where_prefixes_are(a: list[int], b: list[int]) -> None:
    for index, (x, y) in enumerate(zip(hashes(a), hashes(b), strict=False), start=1):
        assert (x == y) == (a[: index * BLOCK] == b[: index * BLOCK])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"salt": "x"}, {}),
        ({"salt": "x"}, {"salt": "y"}),
        ({"salt": "x"}, {"adapter": "x"}),
        ({"salt": "ab", "adapter": "c"}, {"salt": "a", "adapter": "bc"}),
    ],
)
def test_domains_share_nothing(one: dict[str, str], other: dict[str, str]) -> None:
    prompt = list(range(3 * BLOCK))
    assert not set(hashes(prompt, **one)) & set(hashes(prompt, **other))


def cached_tokens(harness: Harness, prompt: list[int], **params: Any) -> int:
    request_id = f"q{len(harness.deltas)}"
    harness.add(request_id, prompt, **{"max_tokens": 2, "seed": 1, **params})
    harness.run()
    return harness.output(request_id).num_cached_tokens


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_repeated_prompt_is_cached_but_for_its_last_token(extra: int) -> None:
    """Case 1: 2B-1, 2B, 2B+1 tokens, each twice."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=32)
    prompt = list(range(2 * BLOCK + extra))
    assert cached_tokens(harness, prompt) == 0
    assert cached_tokens(harness, prompt) == (len(prompt) - 1) // BLOCK * BLOCK < len(prompt)
    expected = alone(tuple(prompt), max_tokens=2, seed=1)
    assert harness.output("q0").choices == harness.output("q1").choices == expected.choices


def test_salts_and_adapters_are_domains_of_their_own() -> None:
    """Case 3: the same string as adapter and as salt."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=64)
    prompt = list(range(40))
    for domain in ({"salt": "x"}, {"adapter": "x"}, {}, {"salt": "y"}):
        assert cached_tokens(harness, prompt, **domain) == 0
        assert cached_tokens(harness, prompt, **domain) == 32


def test_prompt_logprobs_write_the_cache_and_never_read_it() -> None:
    """Case 4: in both orders, one entry for each prompt token, the first null, equal to the request alone."""
    p, q = list(range(20)), list(range(100, 117))
    for order in ([p, p + q, p], [p + q, p, p + q]):
        harness = Harness(block_size=BLOCK, num_kv_blocks=64, max_num_batched_tokens=64, max_num_seqs=4)
        for prompt in order:
            assert cached_tokens(harness, prompt, prompt_logprobs=2) == 0
            output = harness.output(f"q{len(harness.deltas) - 1}")
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None and None not in output.prompt_logprobs[1:]
            expected = alone(tuple(prompt), max_tokens=2, seed=1, prompt_logprobs=2)
            assert output.prompt_logprobs == expected.prompt_logprobs
        assert cached_tokens(harness, p + q) == 32  # written


def test_a_disabled_cache_finds_and_keeps_nothing() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=32, enable_prefix_caching=False)
    assert [cached_tokens(harness, list(range(30))) for _ in range(2)] == [0, 0]
    assert harness.llm.stats().num_cached_blocks == 0 and harness.llm.stats().num_free_blocks == 32


def test_a_dialogue_computes_only_what_is_new() -> None:
    """20 turns: of each turn's prompt only the new turn and less than a block are computed."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=400, max_num_batched_tokens=2048)
    history: list[int] = []
    for turn in range(20):
        history += [(turn * 13 + i) % 250 for i in range(30)]
        before = harness.llm.stats().num_computed_tokens
        num_cached = cached_tokens(harness, history, max_tokens=10)
        assert turn == 0 or len(history) - num_cached <= 30 + 10 + BLOCK
        assert harness.llm.stats().num_computed_tokens - before == len(history) - num_cached + 9
        history += harness.output(f"q{turn}").choices[0].token_ids


def test_an_evicted_prefix_is_computed_again() -> None:
    """Case 2: request 2 shares 1's prefix and waits; request 3 evicts that prefix; 2 equals solo."""
    harness = Harness(block_size=BLOCK, num_kv_blocks=8, max_num_seqs=1)
    shared = list(range(24))
    harness.add("one", shared, max_tokens=2, seed=1)
    harness.run()
    harness.add("three", list(range(200, 240)), max_tokens=20, seed=1)
    harness.add("two", [*shared, 7], max_tokens=9, seed=1)
    harness.run()
    assert harness.output("two").choices == alone((*shared, 7), max_tokens=9, seed=1).choices
    assert harness.output("two").num_cached_tokens < 24


def test_the_second_tier_brings_evicted_prefixes_back() -> None:
    tiers = {
        tier: Harness(
            block_size=BLOCK, num_kv_blocks=8, num_host_slots=32, max_num_seqs=1, enable_host_prefix_cache=tier
        )
        for tier in (False, True)
    }
    prompt = list(range(33))
    for tier, harness in tiers.items():
        cached_tokens(harness, prompt)
        cached_tokens(harness, list(range(100, 160)))  # evicts all of it
        assert cached_tokens(harness, prompt) == (32 if tier else 0)
        assert harness.output("q2").choices == alone(tuple(prompt), max_tokens=2, seed=1).choices
        assert harness.llm.stats().num_swapped_in_blocks == (4 if tier else 0)


def test_queries_and_hits_are_counted_in_tokens() -> None:
    harness = Harness(block_size=BLOCK, num_kv_blocks=32)
    for _ in range(2):
        cached_tokens(harness, list(range(20)))
    stats = harness.llm.stats()
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (40, 16)
