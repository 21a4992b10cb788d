"""sglang #36344: chunk sizes that are no multiple of the page size.

Kind: two lengths that need not divide one another. Siblings: chunks below a block, of one token, equal to a block, one
beside it, several blocks and a bit; the chunk changes from step to step as others take the budget; block sizes;
attention's tiles; a cached beginning that ends inside a chunk; budgets that cannot work, refused at start.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine import EngineConfig
from engine.config import LoadedModel
from engine.errors import InvalidConfig
from tests.cases.trial import BLOCK, Trial, prompt_of


@pytest.mark.parametrize("chunk", [1, 7, 8, 9, 20])
def test_prompts_around_the_chunk(any_tiny: LoadedModel, chunk: int) -> None:
    """chunk-1, chunk and chunk+1 tokens, together and then from the cache: each equals solo."""
    engine = Trial(any_tiny, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4))
    for _ in range(2):
        for extra in (-1, 0, 1, 2 * BLOCK):
            request_id = f"r{len(engine.asked)}"
            engine.add(request_id, prompt_of(max(1, chunk + extra)), max_tokens=5, logprobs=1)
        engine.run()
    engine.assert_all_as_alone()
    assert chunk < BLOCK or engine.llm.stats().num_prefix_hit_tokens > 0


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_chunks_that_vary_with_the_company(trial: Callable[..., Trial], block_size: int) -> None:
    rng = random.Random(block_size)
    engine = trial(block_size=block_size, max_num_batched_tokens=37, max_num_seqs=7, num_kv_blocks=60)
    for index in range(9):
        engine.add(
            f"r{index}", prompt_of(rng.randint(1, 150), seed=index % 2), max_tokens=rng.randint(1, 25), seed=index
        )
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.run()
    engine.assert_all_as_alone()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 12}, "block_size"),
        ({"block_size": 128}, "block_size"),
        ({"num_kv_blocks": 0}, "num_kv_blocks"),
        ({"max_step_seconds": 0.0}, "max_step_seconds"),
        ({"max_step_seconds": float("nan")}, "max_step_seconds"),
        ({"swap_space": float("nan")}, "swap_space"),
        ({"swap_space": -1.0}, "swap_space"),
    ],
)
def test_budgets_that_cannot_work_are_refused_at_start(settings: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.param == field
