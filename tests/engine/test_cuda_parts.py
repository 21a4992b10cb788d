"""The parts of the GPU runner that need no GPU: sizes, padding, fences, staging, and what the draws are told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.cuda.buckets import Bucket, Buckets
from engine.cuda.decode_inputs import decode_inputs, empty_inputs
from engine.cuda.device_sampler import DeviceSampler
from engine.cuda.fences import Fences
from engine.cuda.late_device import LateDevice
from engine.cuda.profiling import MemoryUse, graph_bytes, largest_batch, num_profiled_blocks
from engine.cuda.runner import CudaRunner
from engine.cuda.staging import Staging, num_bytes_of
from engine.errors import InvalidConfig
from engine.fake_runner import VOCAB_SIZE, load_fake
from engine.filters import support as support_of_row
from engine.guided.compiler import GrammarCompiler
from engine.kv_storage import KVStorage
from engine.models.decoder import Decoder
from engine.models.families import decoder_config
from engine.models.weights import load_weights
from engine.params import Guided, SamplingParams
from engine.plan import BlockMove, Plan, Row
from engine.sampler import Draw, sample
from engine.sequence import SEED_MASK, Request, Sequence
from engine.weights.safetensors import Checkpoint
from kernels.sampling.support import support

CPU = torch.device("cpu")
GIB = 1 << 30


# ---- buckets


@pytest.mark.parametrize("most", [1, 3, 8, 16, 63, 64, 200, 256])
def test_every_number_of_rows_has_a_bucket_with_little_padding(most: int) -> None:
    buckets = Buckets(most, 5000)
    for num_rows in range(1, most + 1):
        bucket = buckets.smallest_for(num_rows, 1)
        assert bucket is not None
        assert num_rows <= bucket.num_rows <= min(most, max(2 * num_rows, num_rows + 32))
    assert buckets.smallest_for(most + 1, 1) is None
    assert buckets.num_rows == sorted(set(buckets.num_rows))


def test_contexts_grow_fourfold_up_to_the_model_s() -> None:
    buckets = Buckets(4, 20_000)
    assert buckets.context_lens == [1024, 4096, 16_384, 20_000]
    assert buckets.smallest_for(3, 1024) == Bucket(4, 1024)
    assert buckets.smallest_for(3, 1025) == Bucket(4, 4096)
    assert buckets.smallest_for(3, 20_001) is None
    assert Buckets(4, 512).context_lens == [512]


# ---- padded inputs


def row(start: int, token_id: int, table: list[int]) -> Row:
    sequence = Sequence(Request("r", [1], SamplingParams(), seed=0), 0, 0)
    return Row(sequence, start, [token_id], table, 1, [sequence])


def test_padding_rows_have_no_query_no_context_and_no_slot() -> None:
    bucket = Bucket(4, 64)
    rows = [row(17, 5, [3, 9, 7]), row(0, 6, [2])]
    arrays = decode_inputs(rows, bucket, 16)
    assert arrays["slots"].tolist() == [9 * 16 + 1, 2 * 16, -1, -1]
    assert arrays["query_starts"].tolist() == [0, 1, 2, 2, 2]
    assert arrays["context_lens"].tolist() == [18, 1, 0, 0]
    assert arrays["token_ids"].tolist() == [5, 6, 0, 0]
    assert arrays["positions"].tolist() == [17, 0, 0, 0]
    assert arrays["block_tables"][:2].tolist() == [[3, 9, 0, 0], [2, 0, 0, 0]]  # no block beyond the context
    empty = empty_inputs(bucket, 16)
    assert {name: (a.shape, a.dtype) for name, a in arrays.items()} == {
        name: (a.shape, a.dtype) for name, a in empty.items()
    }
    assert list(arrays) == list(empty)


def test_a_table_that_does_not_cover_its_token_is_refused() -> None:
    with pytest.raises(IndexError):
        decode_inputs([row(32, 5, [3, 9])], Bucket(1, 64), 16)


# ---- fences


class Copy:
    def __init__(self) -> None:
        self.done = False

    def is_done(self) -> bool:
        return self.done


def test_a_block_being_swapped_out_may_be_read_and_not_written() -> None:
    fences: Fences[Copy] = Fences()
    out = Copy()
    fences.are_read([1, 2], out)
    assert fences.before(reading=[1, 2, 3]) == []
    assert fences.before(writing=[2, 1]) == [out]  # once
    out.done = True
    assert fences.before(writing=[1, 2]) == []
    assert len(fences) == 0


def test_a_block_being_swapped_in_may_be_neither_read_nor_written() -> None:
    fences: Fences[Copy] = Fences()
    back, other = Copy(), Copy()
    fences.are_written([4], back)
    fences.are_written([5], other)
    assert fences.before(reading=[4]) == [back]
    assert fences.before(writing=[5]) == [other]
    assert fences.before(reading=[6], writing=[7]) == []


# ---- staging


def test_arrays_arrive_whatever_their_type_and_in_the_places_foretold() -> None:
    device = LateDevice()
    arrays = {
        "a": np.arange(3, dtype=np.int64),
        "b": np.array([[1.5, 2.5]], dtype=np.float32),
        "c": np.array([True, False, True]),
        "d": np.zeros(0, dtype=np.int32),
    }
    staging = Staging(device, num_bytes_of(arrays))
    foretold = staging.views(arrays)
    for name, tensor in staging.upload(arrays).items():
        np.testing.assert_array_equal(tensor.numpy(), arrays[name])
        assert tensor.data_ptr() == foretold[name].data_ptr()
    with pytest.raises(ValueError, match="do not fit"):
        staging.upload({**arrays, "e": np.zeros(1)})


def test_a_host_buffer_is_written_again_only_after_its_copy_ended() -> None:
    """The stream copies as late as it may: a buffer overwritten too early would bring the newer numbers twice."""
    device = LateDevice()
    stream = device.new_stream()
    staging = Staging(device, 64, stream)
    seen: list[list[int]] = []
    for step in range(5):
        on_device = staging.upload({"a": np.full(4, step)})["a"]
        stream.run(lambda tensor=on_device: seen.append(tensor.tolist()))  # type: ignore[misc]
    stream.record().wait()
    assert seen == [[step] * 4 for step in range(5)]


# ---- draws


def sequence_of(index: int, params: SamplingParams, prompt: list[int], output: list[int]) -> Sequence:
    request = Request(
        str(index), prompt, params, seed=(index * 2**61 + 7) & SEED_MASK, bad_word_token_ids=[[7], [output[-1], 11]]
    )
    request.stop_token_ids = frozenset({2, 3})
    return Sequence(request, index % 3, request.seed, list(output))


KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.8),
    SamplingParams(temperature=1.5, min_p=0.1, top_k=40, top_p=0.95),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.3, logprobs=0),
    SamplingParams(temperature=0.0, logit_bias={5: 8.0, 9: -100.0}, min_tokens=50),
    SamplingParams(temperature=1.0, top_k=1, repetition_penalty=0.8),
]


@pytest.mark.parametrize("seed", range(4))
def test_the_device_s_sampler_draws_what_the_engine_s_draws(seed: int) -> None:
    """Over the reference kernels; the Triton ones are compared with these."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 300, generator=generator) * 3
    logits[1] = torch.round(logits[1])  # many equal ones
    logits[4, 9] = torch.nan
    prompt = torch.randint(300, (30,), generator=generator).tolist()
    output = torch.randint(300, (20,), generator=generator).tolist()
    draws = [
        Draw(index % 6, sequence_of(index + seed, KINDS[index % len(KINDS)], prompt, output)) for index in range(24)
    ]
    before = logits.clone()
    found = DeviceSampler(LateDevice()).draw(logits, draws).result()
    assert found == sample(logits, draws)
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))
    assert any(each.error for each in found) and len({each.token_id for each in found}) > 5


@pytest.mark.parametrize("seed", range(3))
def test_the_support_is_the_engine_s(seed: int) -> None:
    logits = torch.randn(40, 500, generator=torch.Generator().manual_seed(seed)) * 3
    logits[::2] = torch.round(logits[::2])
    logits[:, 100:200] = -math.inf
    params = [
        SamplingParams(temperature=0.5 + index / 20, top_k=k, top_p=p, min_p=m)
        for index, (k, p, m) in enumerate(
            (k, p, m) for k in (0, 1, 30, 1000) for p in (1.0, 0.9, 0.01) for m in (0.0, 0.05, 1.0)
        )
    ]
    rows = logits[: len(params)]
    found = support(
        rows,
        [each.temperature for each in params],
        [each.top_k or 0 for each in params],
        [each.top_p for each in params],
        [each.min_p for each in params],
    )
    ids = torch.arange(500)
    for index, each in enumerate(params):
        floor, last = found.floors[index], found.last_ids[index]
        kept = (rows[index] > floor) | ((rows[index] == floor) & (ids <= last))
        kept &= rows[index] > -math.inf
        expected = support_of_row(rows[index].numpy(), each)
        assert kept.nonzero().squeeze(1).tolist() == expected.tolist(), (index, each.top_k, each.top_p, each.min_p)


# ---- sizing


def test_the_pool_gets_what_utilization_leaves() -> None:
    use = MemoryUse(total=80 * GIB, others=2 * GIB, peak=20 * GIB)
    assert use.kv_budget(0.9, reserved=GIB) == 72 * GIB - 2 * GIB - 20 * GIB - GIB
    with pytest.raises(InvalidConfig, match="nothing is left") as caught:
        use.kv_budget(0.25, reserved=0)
    assert caught.value.param == "gpu_memory_utilization"


def test_graphs_reserve_their_largest_attention() -> None:
    found = graph_bytes(Bucket(64, 8192), num_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128_256)
    assert found == 64 * 4 * 8 * 32 * 130 * 4 + 3 * 64 * 128_256 * 4


@pytest.mark.parametrize("seed", range(3))
def test_grammars_shape_draws_on_the_device_as_in_the_engine(seed: int) -> None:
    """With filters and without, beside rows that are free; one whose grammar leaves nothing says so."""
    pytest.importorskip("llguidance")
    tokenizer = load_fake(EngineConfig()).tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9),
        SamplingParams(temperature=1.0, presence_penalty=0.5, top_p=0.7),
    ]
    for kinds_of_step in (kinds[:2], kinds):
        draws = []
        for index in range(8):
            sequence = sequence_of(index, kinds_of_step[index % len(kinds_of_step)], [65, 66], [97, 98])
            if index % 3:
                sequence.matcher = compiler.compile(Guided(regex="ab[c-z]{1,9}[0-9]" if index < 7 else "x+"))
            draws.append(Draw(index, sequence))
        found = DeviceSampler(LateDevice()).draw(logits, draws).result()
        assert found == sample(logits, draws)
        assert all(97 + 2 <= found[index].token_id <= 122 for index in (1, 2, 4, 5))
        assert found[7].error is not None


# ---- the runner over torch's operators


def runner_of(folder: Path, num_blocks: int, num_host_slots: int) -> CudaRunner:
    config = decoder_config(json.loads((folder / "config.json").read_text()))
    decoder = Decoder(config, load_weights(Checkpoint(folder), config, torch.float32, CPU), 64, CPU)
    device = LateDevice()
    return CudaRunner(
        device,
        decoder,
        KVStorage(config, 16, num_blocks, num_host_slots, torch.float32, CPU),
        DeviceSampler(device),
        max_model_len=64,
        block_size=16,
        buckets=None,
    )


def test_moves_alone_are_done_when_execute_returns(tiny_folder: Path) -> None:
    runner = runner_of(tiny_folder, 6, 3)
    runner._kv.pool.normal_()
    before = runner._kv.pool[:, :, [1, 4]].clone()
    runner.execute(Plan(0, swap_out=[BlockMove(1, 2), BlockMove(4, 0)]))
    assert torch.equal(runner._kv.host[[2, 0]].permute(1, 2, 0, 3, 4, 5), before)
    runner.execute(Plan(0, swap_in=[BlockMove(2, 5)]))
    assert torch.equal(runner._kv.pool[:, :, 5], before[:, :, 0])


def test_a_row_that_follows_takes_its_token_on_the_device(tiny_folder: Path) -> None:
    tokens = list(range(5, 25))
    outputs = []
    for is_ahead in (True, False):
        runner = runner_of(tiny_folder, 4, 0)
        sequence = Sequence(Request("r", tokens, SamplingParams(temperature=1.0), seed=3), 0, 3)
        first = runner.launch(Plan(1, [Row(sequence, 0, tokens, [2, 0], 1, [sequence])]))
        if is_ahead:
            second = runner.launch(Plan(2, [Row(sequence, 20, [0], [2, 0], 1, [sequence], follows=0)], 1))
            found = first.result().samples + second.result().samples
        else:
            found = first.result().samples
            sequence.output_token_ids.append(found[0].token_id)
            found += runner.execute(Plan(2, [Row(sequence, 20, [found[0].token_id], [2, 0], 1, [sequence])], 1)).samples
        outputs.append([sampled.token_id for sampled in found])
    assert outputs[0] == outputs[1]
    with pytest.raises(ValueError, match="the last step had none"):
        runner.launch(Plan(4)).result()
        runner.launch(Plan(5, [Row(sequence, 20, [0], [2, 0], 1, [sequence], follows=0)], 1)).result()


@pytest.mark.parametrize("max_model_len", [1000, 200, 64, 50])
def test_the_profiled_step_is_as_long_as_allowed_and_within_the_model_s_context(max_model_len: int) -> None:
    config = EngineConfig(max_num_batched_tokens=200, max_num_seqs=7)
    batch = largest_batch(max_model_len, config, CPU)
    assert len(batch.token_ids) == 200 and int(batch.positions.max()) < max_model_len
    assert batch.rows.query_starts[-1] == sum(batch.rows.context_lens) == 200
    assert len(batch.logit_places) == 7 and len(set(batch.slots.tolist())) == 200
    assert int(batch.slots.max()) < num_profiled_blocks(max_model_len, config) * config.block_size
