"""nano-vllm #144: a prompt that ends at a block's border and is cached to its end.

Kind: whatever is reused ends at a border. Siblings: borders of every block size, prompts that end one token beside
them, outputs that cross them, prompts that share all but their last token, sliding windows, n > 1, the same prompt
twice in one step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.config import LoadedModel
from tests.cases.trial import BLOCK, Trial, prompt_of


@pytest.mark.parametrize("block_size", [8, 32])
def test_prompts_around_a_border_twice_each(any_tiny: LoadedModel, block_size: int) -> None:
    """2B-1, 2B and 2B+1 tokens, each twice: cached tokens stay under the prompt's length, tokens stay those of solo."""
    trial = Trial(any_tiny, block_size=block_size)
    for length in (2 * block_size - 1, 2 * block_size, 2 * block_size + 1):
        prompt = prompt_of(length, seed=length)
        for is_second in (False, True):
            output = trial.ask(prompt, max_tokens=10, logprobs=2)
            cached = (length - 1) // block_size * block_size
            assert output.num_cached_tokens == (cached if is_second else 0) < length
    trial.assert_all_as_alone()


def test_the_shortest_prompts(trial: Callable[..., Trial]) -> None:
    engine = trial()
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1):
        for num_cached in (0, (length - 1) // BLOCK * BLOCK):
            output = engine.ask(prompt_of(length), max_tokens=2 * BLOCK + 1, temperature=0.0)
            assert output.num_cached_tokens == num_cached
    engine.assert_all_as_alone()


@pytest.mark.parametrize("max_tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_a_dialogue_continues_where_an_answer_ended_at_a_border(trial: Callable[..., Trial], max_tokens: int) -> None:
    """The last token drawn has no KV: a block that it fills must not be found."""
    engine = trial()
    first = engine.ask(prompt_of(BLOCK), max_tokens=max_tokens)
    history = [*first.prompt_token_ids, *first.choices[0].token_ids]
    second = engine.ask([*history, 7], max_tokens=6)
    assert second.num_cached_tokens == (len(history) - 1) // BLOCK * BLOCK
    third = engine.ask(history, max_tokens=6)  # cached to its end: one token must be left to compute
    assert third.num_cached_tokens == (len(history) - 1) // BLOCK * BLOCK
    engine.assert_all_as_alone()


def test_prompts_that_part_at_a_border(trial: Callable[..., Trial]) -> None:
    engine = trial()
    shared = prompt_of(4 * BLOCK)
    engine.ask(shared, max_tokens=1)
    for common in range(2 * BLOCK - 1, 2 * BLOCK + 2):
        output = engine.ask([*shared[:common], 300, *shared[common:]], max_tokens=5, logprobs=0)
        assert output.num_cached_tokens == common // BLOCK * BLOCK
    engine.assert_all_as_alone()


@pytest.mark.parametrize("n", [1, 3])
def test_equal_prompts_in_one_step_and_one_step_apart(trial: Callable[..., Trial], n: int) -> None:
    """A block becomes findable while another sequence computes the same one."""
    engine = trial(max_num_batched_tokens=3 * BLOCK)
    for index in range(4):
        engine.add(f"r{index}", prompt_of(2 * BLOCK + index % 2 - 1), max_tokens=12, n=n, seed=index)
        if index:
            engine.step()
    engine.run()
    engine.assert_all_as_alone()
