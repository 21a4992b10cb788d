"""One model on two ranks of a CPU: the tokens of one rank, and a clean end where a rank is lost."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.errors import DeviceFailed, InvalidConfig
from engine.models.families import decoder_config
from engine.models.weights import load_weights
from engine.parallel.frames import read_frame, write_frame
from engine.parallel.order import StepOrder, order_of
from engine.parallel.runner import ParallelRunner
from engine.parallel.shard import Shard
from engine.plan import BlockMove, Plan, Row
from engine.runner import load_runner
from engine.sequence import Request, Sequence
from engine.weights.safetensors import Checkpoint
from tests.models import make_tiny_model

CPU = torch.device("cpu")


class Half:
    """The group as one of two ranks sees it, where the other one's part is known to be all zeros or all NaN."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def ordered_sum(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def gathered(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def least(self, number: int) -> int:
        return number


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gemma2"])  # plain; biases; fused in the file; tied
def test_the_shares_of_two_ranks_make_up_the_model(family: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / family, family)
    config = decoder_config(json.loads((folder / "config.json").read_text()))
    whole = load_weights(Checkpoint(folder), config, torch.float32, CPU)
    first, second = (load_weights(Checkpoint(folder), config, torch.float32, CPU, Half(rank)) for rank in (0, 1))
    x = torch.randn(3, config.hidden_size)
    inner = torch.randn(3, config.num_heads * config.head_dim)
    for mine, one, two in zip(whole.layers, first.layers, second.layers, strict=True):
        parts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        heads = [torch.split(mine.qkv(x).view(3, -1, config.head_dim), parts, dim=1)]
        halves = [
            torch.split(share.qkv(x).view(3, -1, config.head_dim), [n // 2 for n in parts], dim=1)
            for share in (one, two)
        ]
        for place in range(3):
            joined = torch.cat([half[place] for half in halves], dim=1)
            torch.testing.assert_close(joined, heads[0][place])
        size = inner.shape[1] // 2
        summed = one.attention_out(inner[:, :size]) + two.attention_out(inner[:, size:])
        torch.testing.assert_close(summed, mine.attention_out(inner))
        gates = [share.gate_up(x).chunk(2, dim=1) for share in (one, two)]
        together = torch.cat([gates[0][0], gates[1][0], gates[0][1], gates[1][1]], dim=1)
        torch.testing.assert_close(together, mine.gate_up(x))
    torch.testing.assert_close(torch.cat([first.head(x), second.head(x)], dim=1), whole.head(x))


def test_orders_and_frames_come_through_whole(tmp_path: Path) -> None:
    sequence = Sequence(Request("r", [1, 2, 3], SamplingParams(), seed=0), 0, 0)
    plan = Plan(7, [Row(sequence, 1, [2, 3], [4, 5], 1, [sequence])], 0, [BlockMove(1, 2)], [BlockMove(3, 0)], [])
    import msgspec

    path = tmp_path / "pipe"
    with path.open("wb") as pipe:
        write_frame(pipe, msgspec.msgpack.encode(order_of(plan)))
        write_frame(pipe, b"")
    with path.open("rb") as pipe:
        first, second, third = (read_frame(pipe) for _ in range(3))
    assert first is not None and second == b"" and third is None
    found = msgspec.msgpack.decode(first, type=StepOrder)
    assert found == order_of(plan)
    assert (found.rows[0].end, found.copies[0].target, found.swap_out[0].source) == (3, 2, 3)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "3 query heads"),
        ({"num_key_value_heads": 1}, "1 KV heads"),
        ({"intermediate_size": 129}, "129 hidden units"),
    ],
)
def test_what_two_ranks_cannot_share_is_refused_by_name(tmp_path: Path, overrides: dict[str, int], what: str) -> None:
    folder = make_tiny_model(tmp_path / "odd", overrides=overrides)
    with pytest.raises(InvalidConfig, match=what) as caught:
        load_runner(str(folder), EngineConfig(device="cpu", tensor_parallel_size=2))
    assert caught.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    "setting",
    [
        {"cpu_kernels": "native"},
        {"dtype": "int8"},
        {"dtype": "int4"},
        {"kv_cache_dtype": "int8"},
        {"speculative": "self"},
        {"speculative_verification": "rejection"},
    ],
)
def test_what_one_rank_alone_can_is_refused_on_two(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="one rank") as caught:
        EngineConfig(tensor_parallel_size=2, **setting)
    assert caught.value.param in setting


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    assert Shard(0, 2).splits_vocabulary(320)
    assert not Shard(0, 3).splits_vocabulary(320)
    assert not Shard(0, 1).splits_vocabulary(320)


# ---- two processes


PROMPTS = [list(range(5, 45)), [7, 8, 9], list(range(100, 120))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, prompt_logprobs=1),
]
SETTINGS = {
    "device": "cpu",
    "cpu_kernels": "torch",
    "num_threads": 1,
    "num_kv_blocks": 12,
    "max_num_batched_tokens": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("parallel") / "tiny")


@pytest.fixture
def two_ranks(folder: Path) -> Iterator[LLM]:
    loaded = load_runner(str(folder), EngineConfig(**SETTINGS, tensor_parallel_size=2, swap_space=0.001))
    assert isinstance(loaded.runner, ParallelRunner)
    yield LLM(loaded, EngineConfig(**SETTINGS, tensor_parallel_size=2, preemption_mode="swap", swap_space=0.001))
    loaded.runner.close()


def tokens_of(llm: LLM) -> list[list[int]]:
    outputs = llm.generate([*PROMPTS], [*PARAMS])
    llm.check_integrity()
    return [choice.token_ids for output in outputs for choice in output.choices]


def test_two_ranks_have_one_rank_s_tokens(folder: Path, two_ranks: LLM) -> None:
    assert two_ranks.info.tensor_parallel_size == 2
    one = LLM(str(folder), EngineConfig(**SETTINGS))
    assert tokens_of(two_ranks) == tokens_of(one)


def runner_of(llm: LLM) -> ParallelRunner:
    runner = llm._executor._runner
    assert isinstance(runner, ParallelRunner)
    return runner


def test_a_lost_rank_ends_all(two_ranks: LLM) -> None:
    (process,) = runner_of(two_ranks)._ranks._processes
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(DeviceFailed, match="rank 1 of 2 ended"):
        two_ranks.generate([*PROMPTS], [*PARAMS])


def test_a_rank_that_fails_says_why(two_ranks: LLM) -> None:
    runner_of(two_ranks)._ranks.send(StepOrder([], [BlockMove(0, 99)], [], []))
    with pytest.raises(DeviceFailed, match="IndexError: BlockMove"):
        two_ranks.generate([*PROMPTS], [*PARAMS])


def test_a_row_without_its_blocks_costs_only_itself(two_ranks: LLM) -> None:
    """It is refused before any rank is told, so the ranks go on together."""
    sequence = Sequence(Request("r", list(range(40)), SamplingParams(), seed=0), 0, 0)
    with pytest.raises(IndexError, match="do not hold 40 tokens"):
        runner_of(two_ranks).execute(Plan(0, [Row(sequence, 0, list(range(40)), [0, 1], 1, [sequence])]))
    assert len(tokens_of(two_ranks)) == 4
