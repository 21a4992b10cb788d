"""The real runner on a tiny model: a row's outcome does not depend on its company, its chunks or its blocks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, LoadedModel
from engine.errors import InvalidConfig, ModelLoadError
from engine.params import SamplingParams
from engine.plan import BlockMove, Plan
from engine.runner import OWN_THREADS, load_runner
from engine.sequence import Sequence
from tests.conftest import skip_or_fail
from tests.engine.runner_aids import Driver, direct_logits, load, new_sequence, new_sequences
from tests.models import make_tiny_model

NUM_TOKENS = 12


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(3, 300), k=length)


def solo(model: LoadedModel, prompt: list[int], params: SamplingParams | None = None, seed: int = 0) -> list[int]:
    """The request alone, in one piece, on an engine of its own."""
    sequence = new_sequence(prompt, params, seed)
    Driver(model).generate([sequence], NUM_TOKENS)
    return sequence.output_token_ids


def test_an_empty_plan_does_nothing(tiny_model: LoadedModel) -> None:
    result = tiny_model.runner.execute(Plan(0))
    assert (result.samples, result.prompt_logprobs) == ([], {})


def test_what_a_model_says_about_itself(tiny_model: LoadedModel, tiny_folder: Path) -> None:
    info = tiny_model.info
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (512, 320, (2,))
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert len(info.weights_digest) == len(info.tokenizer_digest) == 64
    assert info.chat_template is not None
    other = load(make_tiny_model(tiny_folder.parent / "other", seed=1)).info
    assert other.weights_digest != info.weights_digest
    assert other.tokenizer_digest == info.tokenizer_digest
    assert tiny_model.runner.num_host_slots > 0


@pytest.mark.parametrize("chunk", [1, 7, 16, 31, 33])
def test_chunks_do_not_change_tokens(tiny_model: LoadedModel, chunk: int) -> None:
    for length in (1, 15, 16, 17, 31, 32, 33, 90):
        sequence = new_sequence(prompt_of(length))
        Driver(tiny_model).generate([sequence], NUM_TOKENS, chunk=chunk)
        assert sequence.output_token_ids == solo(tiny_model, prompt_of(length))


@pytest.mark.parametrize("budget", [9, 40, 1000])
def test_company_does_not_change_tokens(tiny_model: LoadedModel, budget: int) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=0.7, presence_penalty=1.0),
    ]
    lengths = [3, 40, 17, 1, 64, 100]
    sequences = [new_sequence(prompt_of(n, i), params[i % 3], seed=i) for i, n in enumerate(lengths)]
    Driver(tiny_model, seed=budget).generate(sequences, NUM_TOKENS, budget=budget)
    for i, (length, sequence) in enumerate(zip(lengths, sequences, strict=True)):
        assert sequence.output_token_ids == solo(tiny_model, prompt_of(length, i), params[i % 3], seed=i)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_block_size_does_not_change_tokens(
    tiny_model: LoadedModel, load_tiny: Callable[..., LoadedModel], block_size: int
) -> None:
    model = load_tiny(block_size=block_size)
    assert solo(model, prompt_of(70)) == solo(tiny_model, prompt_of(70))


def test_choices_draw_from_one_forward_of_their_prompt(tiny_model: LoadedModel) -> None:
    params = SamplingParams(n=5, temperature=1.0)
    request = new_sequences(prompt_of(20), params, seed=3)
    driver = Driver(tiny_model)
    row = driver.row(request.sequences[0])
    row.draws = request.sequences
    samples = driver.step(row)
    assert len({sampled.token_id for sampled in samples}) > 1
    alone = new_sequences(prompt_of(20), params, seed=3)
    for sequence, sampled in zip(alone.sequences, samples, strict=True):
        driver = Driver(tiny_model)
        assert driver.step(driver.row(sequence)) == [sampled]


def test_a_fork_that_copies_its_last_block_goes_its_own_way(tiny_model: LoadedModel) -> None:
    """Both share two blocks; the second one is only part full, so whoever writes first copies it."""
    driver = Driver(tiny_model)
    params = SamplingParams(n=2, temperature=1.0)
    first, second = new_sequences(prompt_of(20), params, seed=5).sequences
    row = driver.row(first)
    row.draws = [first, second]
    driver.step(row)
    copy = driver.free.pop()
    second.block_table = [first.block_table[0], copy]
    second.num_computed_tokens = 20
    move = BlockMove(first.block_table[1], copy)
    driver.step(driver.row(first), driver.row(second), copies=[move])
    driver.generate([first, second], NUM_TOKENS)
    for choice, sequence in enumerate((first, second)):
        other = new_sequences(prompt_of(20), params, seed=5).sequences[choice]
        Driver(tiny_model).generate([other], NUM_TOKENS)
        assert sequence.output_token_ids == other.output_token_ids


def test_swap_in_the_middle_is_invisible(tiny_model: LoadedModel) -> None:
    driver = Driver(tiny_model)
    away, stays = new_sequence(prompt_of(50)), new_sequence(prompt_of(30, 1))
    driver.generate([away, stays], 5)
    old = away.block_table
    slots = list(range(len(old)))
    driver.step(driver.row(stays), swap_out=[BlockMove(*pair) for pair in zip(old, slots, strict=True)])
    driver.release(away)
    driver.generate([new_sequence(prompt_of(200, 2))], 3)  # writes over what was released
    away.block_table = [driver.free.pop(0) for _ in old]
    back = [BlockMove(*pair) for pair in zip(slots, away.block_table, strict=True)]
    driver.step(driver.row(away), swap_in=back)
    driver.generate([away, stays], NUM_TOKENS)
    assert away.output_token_ids == solo(tiny_model, prompt_of(50))
    assert stays.output_token_ids == solo(tiny_model, prompt_of(30, 1))


def poison(driver: Driver, sequence: Sequence) -> None:
    """Turns the sequence's cached values into NaN."""
    for layer in range(2):
        for pool in driver.runner._kv.layer(layer):
            pool[sequence.block_table] = torch.nan


def test_a_sequence_with_broken_kv_fails_alone(load_tiny: Callable[..., LoadedModel]) -> None:
    driver = Driver(load_tiny())
    sequences = [new_sequence(prompt_of(n, i)) for i, n in enumerate((20, 33, 47))]
    driver.generate(sequences, 3)
    poison(driver, sequences[1])
    samples = driver.step(*(driver.row(sequence) for sequence in sequences))
    assert [sampled.error is None for sampled in samples] == [True, False, True]
    driver.generate([sequences[0], sequences[2]], NUM_TOKENS)
    for i, n in ((0, 20), (2, 47)):
        assert sequences[i].output_token_ids == solo(load_tiny(), prompt_of(n, i))


def test_blocks_that_held_nan_harm_no_later_owner(load_tiny: Callable[..., LoadedModel]) -> None:
    driver = Driver(load_tiny())
    for layer in range(2):
        for pool in driver.runner._kv.layer(layer):
            pool.fill_(torch.nan)
    sequences = [new_sequence(prompt_of(n, i)) for i, n in enumerate((1, 18, 35, 130))]
    driver.generate(sequences, NUM_TOKENS, budget=50)
    for i, n in enumerate((1, 18, 35, 130)):
        assert sequences[i].output_token_ids == solo(load_tiny(), prompt_of(n, i))


@pytest.mark.parametrize("chunk", [1000, 7])
def test_prompt_logprobs_are_those_of_a_direct_forward(tiny_model: LoadedModel, chunk: int) -> None:
    prompt = prompt_of(40)
    sequence = new_sequence(prompt, SamplingParams(temperature=0.0, prompt_logprobs=3))
    other = new_sequence(prompt_of(25, 1))
    driver = Driver(tiny_model)
    while sequence.num_computed_tokens < len(prompt):
        num_left = len(prompt) - sequence.num_computed_tokens
        rows = [driver.row(sequence, chunk, num_logits=min(chunk, num_left))]
        if other.num_computed_tokens < 25:
            rows.insert(0, driver.row(other, chunk))
        driver.step(*rows)
    driver.generate([sequence], NUM_TOKENS)
    assert sequence.output_token_ids == solo(tiny_model, prompt)
    found = driver.prompt_logprobs[sequence]
    assert [entry.chosen.token_id for entry in found] == prompt[1:]
    logits = direct_logits(tiny_model, prompt).double().log_softmax(-1)
    for place, entry in enumerate(found):
        ranked = logits[place].sort(descending=True, stable=True).indices.tolist()
        assert entry.chosen.rank == ranked.index(prompt[place + 1]) + 1
        assert entry.chosen.logprob == pytest.approx(float(logits[place, prompt[place + 1]]), abs=1e-4)
        assert [top.token_id for top in entry.top] == ranked[:3]
    assert other not in driver.prompt_logprobs


def test_a_block_table_too_short_is_refused_before_anything_is_computed(tiny_model: LoadedModel) -> None:
    driver = Driver(tiny_model)
    row = driver.row(new_sequence(prompt_of(40)))
    row.block_table.pop()
    with pytest.raises(IndexError):
        tiny_model.runner.execute(Plan(0, [row]))


@pytest.mark.parametrize(
    ("config", "param"),
    [
        (EngineConfig(max_model_len=513), "max_model_len"),
        (EngineConfig(kv_cache_memory_bytes=1000), "kv_cache_memory_bytes"),
    ],
)
def test_settings_that_do_not_fit_the_model_name_the_field(tiny_folder: Path, config: EngineConfig, param: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load_runner(str(tiny_folder), config)
    assert caught.value.param == param


def test_cuda_without_a_gpu_is_refused(tiny_folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InvalidConfig, match="cuda"):
        load_runner(str(tiny_folder), EngineConfig(device="cuda"))


def test_the_pool_is_sized_by_its_budget(tiny_folder: Path) -> None:
    bytes_per_block = 2 * 2 * 16 * 2 * 16 * 4  # key and value, layers, positions, kv heads, head dim, fp32
    config = EngineConfig(kv_cache_memory_bytes=10 * bytes_per_block + 5, swap_space=1.0)
    runner = load_runner(str(tiny_folder), config).runner
    assert runner.num_kv_blocks == 10
    assert runner.num_host_slots == (1 << 30) // bytes_per_block


def test_half_precision_runs(tiny_folder: Path) -> None:
    model = load(tiny_folder, dtype="bfloat16")
    assert model.info.dtype == "bfloat16"
    assert len(solo(model, prompt_of(20))) == NUM_TOKENS


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "spiral"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"intermediate_size": 120}, "mlp.gate_proj"),
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
    ],
)
def test_a_model_that_cannot_be_run_is_refused_by_name(tmp_path: Path, overrides: dict[str, object], what: str) -> None:
    import json

    folder = make_tiny_model(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text()) | overrides
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    with pytest.raises(ModelLoadError, match=what):
        load(folder)


def test_torch_threads_leave_the_cores_to_the_native_path(tiny_folder: Path) -> None:
    """They spin for a while behind every call: beside a forward with threads of its own that is a core less."""
    try:
        load(tiny_folder, cpu_kernels="native", num_threads=2)
    except InvalidConfig as error:
        skip_or_fail(str(error))
    assert torch.get_num_threads() == 1
    load(tiny_folder, cpu_kernels="torch", num_threads=2)
    assert torch.get_num_threads() == 2
    load(tiny_folder, cpu_kernels="torch")
    assert torch.get_num_threads() == OWN_THREADS
