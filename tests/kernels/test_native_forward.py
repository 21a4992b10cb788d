"""The native CPU path: the torch decoder's logits, and the same bits whatever shares the step with a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch

from engine.batch import Batch, build_batch
from engine.kv_storage import KVStorage
from engine.models.config import DecoderConfig
from engine.models.decoder import Decoder
from engine.models.families import decoder_config
from engine.models.native import NativeDecoder, why_not
from engine.models.packed import WeightsDtype
from engine.models.weights import DecoderWeights, load_weights
from engine.params import SamplingParams
from engine.plan import Row
from engine.sequence import Request, Sequence
from engine.weights.safetensors import Checkpoint
from kernels.cpu import library
from kernels.cpu.build import VARIANTS, BuildUnavailable, usable_variants
from tests.conftest import need_native_path
from tests.models import FAMILIES, make_tiny_model

CPU = torch.device("cpu")
MAX_LEN = 320


@pytest.fixture(scope="session", autouse=True)
def _native() -> None:
    need_native_path()


def load(folder: Path) -> tuple[DecoderConfig, DecoderWeights]:
    config = decoder_config(json.loads((folder / "config.json").read_text()))
    return config, load_weights(Checkpoint(folder), config, torch.float32, CPU)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderConfig, DecoderWeights]:
    """Three query heads for a KV head, widths that are no multiple of a panel."""
    overrides = {"num_attention_heads": 6, "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2}
    return load(make_tiny_model(tmp_path_factory.mktemp("native") / "llama", overrides=overrides))


class Formats(NamedTuple):
    products: WeightsDtype
    kv: torch.dtype


@pytest.fixture(params=[Formats("float32", torch.float32), Formats("int8", torch.float32), Formats("int8", torch.int8)])
def formats(request: pytest.FixtureRequest) -> Formats:
    return cast(Formats, request.param)


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 320, (count,), generator=generator).tolist()


def row(start: int, token_ids: list[int], table: list[int], num_logits: int) -> Row:
    request = Request("r", token_ids, SamplingParams(), seed=0)
    return Row(Sequence(request, choice=0, seed=0), start, token_ids, table, num_logits)


def storage(config: DecoderConfig, block_size: int, kv_dtype: torch.dtype) -> KVStorage:
    return KVStorage(config, block_size, 4096 // block_size, 0, kv_dtype, CPU)


def table_of(sequence: int, block_size: int) -> list[int]:
    """Blocks of one of up to 12 sequences, out of order and apart from the others'."""
    num_blocks = MAX_LEN // block_size
    return [sequence * num_blocks + (block * 7 + 3) % num_blocks for block in range(num_blocks)]


Forward = Callable[[Batch, KVStorage], torch.Tensor]


def run(
    forward: Forward,
    config: DecoderConfig,
    block_size: int,
    *steps: list[Row],
    kv_dtype: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    kv = storage(config, block_size, kv_dtype)
    return [forward(build_batch(rows, block_size, CPU), kv) for rows in steps]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_logits_of_the_torch_decoder(family: str, tmp_path: Path) -> None:
    config, weights = load(make_tiny_model(tmp_path / family, family))
    assert why_not(config, weights, CPU) is None
    prompt = tokens(150, seed=1)
    step = [row(0, prompt, table_of(0, 16), num_logits=150)]
    (native,) = run(NativeDecoder(config, weights, MAX_LEN, 2).forward, config, 16, step)
    (expected,) = run(Decoder(config, weights, MAX_LEN, CPU).forward, config, 16, step)
    torch.testing.assert_close(native, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("chunks", [[1] * 5 + [145], [16] * 10, [7, 64, 63, 16], [149, 1]])
def test_chunks_and_block_sizes_do_not_change_a_bit(
    llama: tuple[DecoderConfig, DecoderWeights], formats: Formats, block_size: int, chunks: list[int]
) -> None:
    config, weights = llama
    forward = NativeDecoder(config, weights, MAX_LEN, 2, formats.products).forward
    prompt = tokens(sum(chunks), seed=2)
    (whole,) = run(forward, config, 16, [row(0, prompt, table_of(1, 16), num_logits=len(prompt))], kv_dtype=formats.kv)
    ends = [sum(chunks[: index + 1]) for index in range(len(chunks))]
    steps = [
        [row(end - count, prompt[end - count : end], table_of(2, block_size), num_logits=count)]
        for count, end in zip(chunks, ends, strict=True)
    ]
    assert torch.equal(torch.cat(run(forward, config, block_size, *steps, kv_dtype=formats.kv)), whole)


SHAPES_OF_ATTENTION: dict[str, tuple[str, dict[str, int]]] = {
    "window and softcap": ("gemma2", {}),
    "1 head for a KV head, of 48": ("llama", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 48}),
    "7 heads for a KV head, of 80": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80}),
    "4 heads for a KV head, of 128": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}),
}


@pytest.mark.parametrize("shape", SHAPES_OF_ATTENTION)
def test_groups_of_query_rows_do_not_change_a_bit(shape: str, formats: Formats, tmp_path: Path) -> None:
    """Of six, of three and single ones, whatever a chunk leaves of each."""
    family, overrides = SHAPES_OF_ATTENTION[shape]
    config, weights = load(make_tiny_model(tmp_path / "model", family, overrides=overrides))
    prompt, decoder = tokens(150, seed=4), NativeDecoder(config, weights, MAX_LEN, 2, formats.products)
    (whole,) = run(decoder.forward, config, 16, [row(0, prompt, table_of(1, 16), num_logits=150)], kv_dtype=formats.kv)
    ends = [1, 2, 4, 9, 73, 100, 149, 150]
    for block_size in (8, 32):
        steps = [
            [row(begin, prompt[begin:end], table_of(2, block_size), num_logits=end - begin)]
            for begin, end in zip([0, *ends], ends, strict=False)
        ]
        assert torch.equal(torch.cat(run(decoder.forward, config, block_size, *steps, kv_dtype=formats.kv)), whole)


@pytest.mark.parametrize("num_rows", [2, 3, 5, 12])
def test_neighbours_do_not_change_a_bit(
    llama: tuple[DecoderConfig, DecoderWeights], formats: Formats, num_rows: int
) -> None:
    config, weights = llama
    forward = NativeDecoder(config, weights, MAX_LEN, 2, formats.products).forward
    prompts = [tokens(3 + 17 * index % 200, seed=index) for index in range(num_rows)]
    nexts = tokens(num_rows, seed=99)

    def steps(members: list[int]) -> list[list[Row]]:
        prefill = [row(0, prompts[i], table_of(i, 16), num_logits=1) for i in members]
        decode = [row(len(prompts[i]), [nexts[i]], table_of(i, 16), num_logits=1) for i in members]
        return [prefill, decode]

    together = run(forward, config, 16, *steps(list(range(num_rows))), kv_dtype=formats.kv)
    for index in range(num_rows):
        alone = run(forward, config, 16, *steps([index]), kv_dtype=formats.kv)
        for shared, single in zip(together, alone, strict=True):
            assert torch.equal(shared[index], single[0])


@pytest.mark.parametrize("num_tokens", range(1, 65))
def test_the_number_of_rows_of_a_product_does_not_change_a_bit(
    llama: tuple[DecoderConfig, DecoderWeights], formats: Formats, num_tokens: int
) -> None:
    config, weights = llama
    forward = NativeDecoder(config, weights, MAX_LEN, 1, formats.products).forward
    prompt = tokens(64, seed=5)
    (whole,) = run(forward, config, 16, [row(0, prompt, table_of(0, 16), num_logits=64)], kv_dtype=formats.kv)
    (part,) = run(
        forward, config, 16, [row(0, prompt[:num_tokens], table_of(0, 16), num_logits=num_tokens)], kv_dtype=formats.kv
    )
    assert torch.equal(part, whole[:num_tokens])


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_threads_do_not_change_a_bit(
    llama: tuple[DecoderConfig, DecoderWeights], formats: Formats, num_threads: int
) -> None:
    config, weights = llama
    step = [row(0, tokens(70 + i, seed=i), table_of(i, 16), num_logits=2) for i in range(3)]
    (one,) = run(
        NativeDecoder(config, weights, MAX_LEN, 1, formats.products).forward, config, 16, step, kv_dtype=formats.kv
    )
    (many,) = run(
        NativeDecoder(config, weights, MAX_LEN, num_threads, formats.products).forward,
        config,
        16,
        step,
        kv_dtype=formats.kv,
    )
    assert torch.equal(one, many)


def test_instruction_sets_agree_to_the_bit(
    llama: tuple[DecoderConfig, DecoderWeights], formats: Formats, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, weights = llama
    step = [row(0, tokens(130, seed=8), table_of(0, 8), num_logits=130)]
    results = []
    for variant in usable_variants():
        monkeypatch.setattr(library, "load", lambda variant=variant: library.Library(variant))
        results += run(
            NativeDecoder(config, weights, MAX_LEN, 2, formats.products).forward, config, 8, step, kv_dtype=formats.kv
        )
    assert results
    assert all(torch.equal(result, results[0]) for result in results)


def test_unwritten_slots_of_a_block_are_never_read(
    llama: tuple[DecoderConfig, DecoderWeights], formats: Formats
) -> None:
    config, weights = llama
    forward = NativeDecoder(config, weights, MAX_LEN, 2, formats.products).forward
    rows = [row(0, tokens(37, seed=3), table_of(0, 64), num_logits=37)]
    (clean,) = run(forward, config, 64, rows, kv_dtype=formats.kv)
    poisoned = storage(config, 64, formats.kv)
    for index in range(config.num_layers):
        for pool in poisoned.layer(index):
            pool.view(torch.uint8).fill_(255)  # NaN in fp32
    assert torch.equal(forward(build_batch(rows, 64, CPU), poisoned), clean)


def test_variants_are_chosen_by_what_the_processor_has() -> None:
    vnni, avx512, avx2 = VARIANTS["x86_64"]
    assert [v.name for v in usable_variants("x86_64", vnni.needs)] == ["avx512vnni", "avx512", "avx2"]
    assert [v.name for v in usable_variants("x86_64", avx512.needs)] == ["avx512", "avx2"]
    assert [v.name for v in usable_variants("x86_64", avx2.needs)] == ["avx2"]
    assert usable_variants("x86_64", frozenset({"sse2"})) == []
    assert usable_variants("riscv64", frozenset()) == []


def test_what_the_native_path_cannot_run_is_said(tmp_path: Path) -> None:
    config, weights = load(make_tiny_model(tmp_path / "odd", overrides={"head_dim": 24}))
    assert "head_dim" in (why_not(config, weights, CPU) or "")
    assert "cuda" in (why_not(config, weights, torch.device("cuda")) or "")


def test_without_a_compiler_the_reason_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildUnavailable, match="g\\+\\+"):
        library.Library(usable_variants()[0])


# ---- the largest logit, found on the way


@pytest.mark.parametrize("vocab", [320, 317, 33, 31])
def test_the_best_tokens_are_those_of_a_search(
    llama: tuple[DecoderConfig, DecoderWeights], formats: Formats, vocab: int
) -> None:
    """Rows that fill several pieces, a vocabulary that ends inside a panel; threads do not matter."""
    config, weights = llama
    config = replace(config, vocab_size=vocab)
    weights = replace(weights, head=replace(weights.head, weight=weights.head.weight[:vocab].clone()))
    for num_threads in (1, 3):
        decoder = NativeDecoder(config, weights, MAX_LEN, num_threads, formats.products)
        for count in (1, 5, 40):
            logits = decoder.forward(
                *step_of(config, formats, [token % vocab for token in tokens(count, count)], count)
            )
            assert decoder.best_ids is not None
            assert decoder.best_ids.tolist() == logits.numpy().argmax(1).tolist()


@pytest.mark.parametrize(
    "columns",
    [{}, {3: 1.0, 9: 1.0, 300: 1.0}, {300: torch.nan, 40: torch.nan, 7: 1e30}, {250: torch.inf, 251: torch.inf}],
)
def test_of_equals_the_first_is_best_and_what_is_no_number_before_all(
    llama: tuple[DecoderConfig, DecoderWeights], columns: dict[int, float]
) -> None:
    """A head of zeros but for some tokens, whose logits are all the same."""
    config, weights = llama
    head = torch.zeros_like(weights.head.weight)
    for column, value in columns.items():
        head[column] = value
    decoder = NativeDecoder(config, replace(weights, head=replace(weights.head, weight=head)), MAX_LEN, 2)
    logits = decoder.forward(*step_of(config, Formats("float32", torch.float32), tokens(9, 4), 9))
    assert decoder.best_ids is not None
    assert decoder.best_ids.tolist() == logits.numpy().argmax(1).tolist()


def step_of(config: DecoderConfig, formats: Formats, token_ids: list[int], num_logits: int) -> tuple[Batch, KVStorage]:
    batch = build_batch([row(0, token_ids, [0, 1, 2], num_logits)], 16, CPU, torch.int32)
    return batch, KVStorage(config, 16, 4, 0, formats.kv, CPU)
