"""The whole GPU runner without a GPU: its Triton kernels interpreted, its streams as late as they may be.

Everything but the arithmetic of a GPU is real: graphs' padded batches, fences, swaps, draws. The tokens are those of
the plain runner on a CPU.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel, ModelInfo
from engine.cuda.buckets import Buckets
from engine.cuda.device_sampler import DeviceSampler
from engine.cuda.late_device import LateDevice
from engine.cuda.runner import CudaRunner
from engine.kv_storage import KVStorage
from engine.models.decoder import Decoder
from engine.models.families import decoder_config
from engine.models.weights import load_weights
from engine.outputs import RequestOutput
from engine.plan import BlockMove, Plan, Row
from engine.runner import TorchRunner
from engine.sequence import Request, Sequence
from engine.text.tokenizer import Tokenizer
from engine.weights.safetensors import Checkpoint
from tests.kernels.interpreted import KERNELS
from tests.models import make_tiny_model

CPU = torch.device("cpu")
assert KERNELS
MAX_MODEL_LEN, BLOCK_SIZE, VOCAB = 128, 16, 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", overrides={"num_hidden_layers": 1})


def decoder_of(folder: Path) -> Decoder:
    config = decoder_config(json.loads((folder / "config.json").read_text()))
    weights = load_weights(Checkpoint(folder), config, torch.float32, CPU)
    return Decoder(config, weights, MAX_MODEL_LEN, CPU)


def plain_runner(folder: Path, num_blocks: int, num_host_slots: int) -> TorchRunner:
    return TorchRunner(decoder_of(folder), MAX_MODEL_LEN, BLOCK_SIZE, num_blocks, num_host_slots, torch.float32)


def gpu_runner(folder: Path, num_blocks: int, num_host_slots: int, max_num_seqs: int = 4) -> CudaRunner:
    """Call while TRITON_INTERPRET is set."""
    decoder, device = decoder_of(folder), LateDevice()
    assert decoder.can_be_captured
    return CudaRunner(
        device,
        decoder,
        KVStorage(decoder.config, BLOCK_SIZE, num_blocks, num_host_slots, torch.float32, CPU),
        DeviceSampler(device),
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        buckets=Buckets(max_num_seqs, MAX_MODEL_LEN),
    )


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def llm(folder: Path, runner: Any, **config: Any) -> LLM:
    info = ModelInfo(
        name="tiny",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB,
        eos_token_ids=(2,),
        weights_digest="",
        tokenizer_digest="",
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        kernels=runner.decoder.kernels,
    )
    return LLM(LoadedModel(runner=runner, tokenizer=Tokenizer(folder), info=info), EngineConfig(**config))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, 300), k=length)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.choices]


REQUESTS: list[tuple[list[int], SamplingParams]] = [
    (prompt_of(40), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)),
    (prompt_of(3, 1), SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True, n=2)),
    (prompt_of(17, 2), SamplingParams(temperature=0.8, top_p=0.9, seed=6, max_tokens=7, ignore_eos=True)),
    (prompt_of(33, 3), SamplingParams(temperature=0.0, presence_penalty=1.0, max_tokens=6, ignore_eos=True)),
    (prompt_of(16, 4), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)),
]


def run_all(engine: LLM) -> list[RequestOutput]:
    outputs = engine.generate([prompt for prompt, _ in REQUESTS], [params for _, params in REQUESTS])
    engine.check_integrity()
    return outputs


def test_mixed_requests_have_the_plain_runner_s_tokens(folder: Path, interpreted: None) -> None:
    """Chunks, decodes of several buckets, forks with copies on write, all kinds of draws."""
    runner = gpu_runner(folder, 32, 0)
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
    found = run_all(llm(folder, runner, **config))
    assert runner.graphs is not None and runner.graphs.num_replays > 5
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        plain = plain_runner(folder, 32, 0)
        expected = run_all(llm(folder, plain, **config))
    assert runner.decoder.kernels == "triton-2" and plain.decoder.kernels == "torch-2"
    assert tokens_of(found) == tokens_of(expected)
    for mine, theirs in zip(found[4].choices[0].logprobs or [], expected[4].choices[0].logprobs or [], strict=True):
        assert mine.chosen.token_id == theirs.chosen.token_id
        assert mine.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-4)


def test_swapped_sequences_come_back_though_copies_are_late(folder: Path, interpreted: None) -> None:
    """A pool of 8 blocks for what needs 14: sequences are swapped out while others go on in their blocks."""
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "preemption_mode": "swap", "swap_space": 1.0}
    engine = llm(folder, gpu_runner(folder, 8, 16), **config)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [prompt_of(length, length) for length in (30, 25, 28, 31)]
    found = engine.generate(prompts, params)
    stats = engine.stats()
    assert stats.num_preempted_swap > 1
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        expected = llm(folder, plain_runner(folder, 64, 0), max_num_seqs=4).generate(prompts, params)
    assert tokens_of(found) == tokens_of(expected)


def test_beams_and_candidates_have_the_plain_runner_s_choices(folder: Path, interpreted: None) -> None:
    """In a pool for one search, so that beams are swapped together and share what they did when they are back."""
    config = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "preemption_mode": "swap", "swap_space": 1.0}
    beams = SamplingParams(n=3, use_beam_search=True, max_tokens=14, logprobs=1, repetition_penalty=1.2)
    ranked = SamplingParams(n=1, best_of=2, seed=4, max_tokens=14, ignore_eos=True)
    prompts, params = [prompt_of(20), prompt_of(35, 1), prompt_of(28, 2)], [beams, ranked, beams]
    engine = llm(folder, gpu_runner(folder, 9, 24, max_num_seqs=8), **config)
    found = engine.generate(prompts, params)
    engine.check_integrity()
    assert engine.stats().num_preempted_swap > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET")
        expected = llm(folder, plain_runner(folder, 64, 0), max_num_seqs=8).generate(prompts, params)
    assert tokens_of(found) == tokens_of(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for choice, other in zip(mine.choices, theirs.choices, strict=True):
            assert choice.score == pytest.approx(other.score, abs=1e-4)


def sequence_of(prompt: list[int]) -> Sequence:
    return Sequence(Request("r", prompt, SamplingParams(temperature=0.0), seed=0), 0, 0)


def test_a_plan_that_writes_over_what_it_swaps_out_keeps_the_old_content(folder: Path, interpreted: None) -> None:
    """Block 1 goes out and is written by the same plan, its content comes back as block 3."""
    runner = gpu_runner(folder, 4, 2)
    first, second = sequence_of(prompt_of(16)), sequence_of(prompt_of(16, 1))
    runner.execute(Plan(0, [Row(first, 0, first.prompt_token_ids, [1], 1, [first])]))
    kept = runner._kv.pool[:, :, 1].clone()
    row = Row(second, 0, second.prompt_token_ids, [1], 1, [second])
    runner.execute(Plan(1, [row], swap_out=[BlockMove(1, 0)]))
    assert not torch.equal(runner._kv.pool[:, :, 1], kept)
    again = Row(first, 16, [5], [3, 2], 1, [first])
    runner.execute(Plan(2, [again], swap_in=[BlockMove(0, 3)]))
    assert torch.equal(runner._kv.pool[:, :, 3], kept)


def test_padding_rows_write_nowhere(folder: Path, interpreted: None) -> None:
    """Three rows run in a graph of four: of the pool, their own three slots change and no other."""
    runner = gpu_runner(folder, 8, 0)
    sequences = [sequence_of([7]) for _ in range(3)]
    before = runner._kv.pool.clone()
    tables = [[1], [3], [6]]
    rows = [Row(s, 0, [7 + i], tables[i], 1, [s]) for i, s in enumerate(sequences)]
    runner.execute(Plan(0, rows, num_decodes=3))
    assert runner.graphs is not None and runner.graphs.num_replays == 1
    changed = (runner._kv.pool != before).flatten(4).any(4).any(0).any(0)  # [blocks, positions]
    assert changed.nonzero().tolist() == [[1, 0], [3, 0], [6, 0]]


def test_a_move_of_a_block_that_does_not_exist_moves_nothing(folder: Path, interpreted: None) -> None:
    runner = gpu_runner(folder, 4, 2)
    with pytest.raises(IndexError):
        runner.execute(Plan(0, swap_out=[BlockMove(0, 0), BlockMove(4, 1)]))
    with pytest.raises(IndexError):
        runner.execute(Plan(0, swap_in=[BlockMove(2, 0)]))
