"""Keys and values in int8 on the native path: what lies in the pool, and what attention makes of it."""

from __future__ import annotations

import pytest
import torch

from engine.batch import build_batch
from engine.kv_storage import SCALE_BYTES, KVStorage
from engine.models.config import DecoderConfig
from engine.models.native import NativeDecoder
from engine.models.weights import DecoderWeights
from kernels.cpu import library
from kernels.cpu.build import BuildUnavailable
from tests.conftest import skip_or_fail
from tests.kernels.test_native_forward import load, row, tokens
from tests.models import make_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, NUM_TOKENS = 16, 12, 150
TABLE = [(block * 5 + 2) % NUM_BLOCKS for block in range(NUM_BLOCKS)]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderConfig, DecoderWeights]:
    try:
        library.load()
    except BuildUnavailable as error:
        skip_or_fail(str(error))
    return load(make_tiny_model(tmp_path_factory.mktemp("kv") / "llama", overrides={"head_dim": 32}))


def forward(decoder: NativeDecoder, kv_dtype: torch.dtype) -> tuple[torch.Tensor, KVStorage]:
    kv = KVStorage(decoder.config, BLOCK_SIZE, NUM_BLOCKS, 0, kv_dtype, CPU)
    step = [row(0, tokens(NUM_TOKENS, seed=4), TABLE, num_logits=NUM_TOKENS)]
    return decoder.forward(build_batch(step, BLOCK_SIZE, CPU), kv), kv


def parts(pool: torch.Tensor, config: DecoderConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's int8 pool as codes [block, head, head_dim * block_size] and scales [block, head, block_size]."""
    flat = pool.reshape(NUM_BLOCKS, config.num_kv_heads, -1)
    scales = flat[:, :, -SCALE_BYTES * BLOCK_SIZE :].contiguous().view(torch.float32)
    return flat[:, :, : -SCALE_BYTES * BLOCK_SIZE], scales


def test_the_pool_holds_codes_and_scales_of_each_token_and_head(model: tuple[DecoderConfig, DecoderWeights]) -> None:
    """Of the first layer, whose keys and values do not depend on attention: the fp32 pool's, to half a step."""
    config, weights = model
    decoder = NativeDecoder(config, weights, 256, 2)
    exact, coded = (forward(decoder, dtype)[1].layer(0) for dtype in (torch.float32, torch.int8))
    written = [divmod(place, BLOCK_SIZE) for place in range(NUM_TOKENS)]
    for which, is_key in ((0, True), (1, False)):
        codes, scales = parts(coded[which], config)
        shape = (config.head_dim, BLOCK_SIZE) if is_key else (BLOCK_SIZE, config.head_dim)
        numbers = codes.float().unflatten(2, shape)
        expected = exact[which].reshape(NUM_BLOCKS, config.num_kv_heads, *shape)
        if is_key:
            numbers, expected = numbers.transpose(2, 3), expected.transpose(2, 3)
        for block, slot in written:
            found = numbers[TABLE[block], :, slot] * scales[TABLE[block], :, slot, None]
            wanted = expected[TABLE[block], :, slot]
            step = wanted.abs().amax(dim=1, keepdim=True) / 127
            assert ((found - wanted).abs() <= step * 0.5001).all()
            assert numbers[TABLE[block], :, slot].abs().amax() == 127


def test_attention_reads_codes_times_scales(model: tuple[DecoderConfig, DecoderWeights]) -> None:
    """A token over an int8 pool, against the same token over an fp32 pool that holds the same numbers."""
    config, weights = model
    decoder = NativeDecoder(config, weights, 256, 2)
    _, coded = forward(decoder, torch.int8)
    plain = KVStorage(config, BLOCK_SIZE, NUM_BLOCKS, 0, torch.float32, CPU)
    for layer in range(config.num_layers):
        for which, spread in ((0, (1, BLOCK_SIZE)), (1, (BLOCK_SIZE, 1))):
            codes, scales = parts(coded.layer(layer)[which], config)
            shape = (config.head_dim, BLOCK_SIZE) if which == 0 else (BLOCK_SIZE, config.head_dim)
            numbers = codes.float().unflatten(2, shape) * scales.unflatten(2, spread)
            plain.layer(layer)[which].copy_(numbers.reshape(plain.layer(layer)[which].shape))
    step = build_batch([row(NUM_TOKENS, [7], TABLE, 1)], BLOCK_SIZE, CPU)
    expected, found = decoder.forward(step, plain), decoder.forward(step, coded)
    assert (
        expected - found
    ).norm() < 0.005 * expected.norm()  # the token's own key and value are rounded, and no other
    for storage in (plain, coded):
        for layer in range(config.num_layers):
            storage.layer(layer)[1][TABLE[0]] = 3  # another value, codes and scales alike: attention must see it
    assert (decoder.forward(step, plain) - expected).norm() > 0.05 * expected.norm()
    assert (decoder.forward(step, coded) - found).norm() > 0.05 * expected.norm()


def test_a_copy_in_int8_writes_where_the_float32_target_reads(model: tuple[DecoderConfig, DecoderWeights]) -> None:
    """One pool under two decoders: what one wrote, the other continues from, near to its own."""
    config, weights = model
    target, copy = (NativeDecoder(config, weights, 256, 2, dtype) for dtype in ("float32", "int8"))
    prompt = tokens(41, seed=6)

    def continued(first: NativeDecoder) -> torch.Tensor:
        kv = KVStorage(config, BLOCK_SIZE, NUM_BLOCKS, 0, torch.float32, CPU)
        first.forward(build_batch([row(0, prompt[:40], TABLE, 1)], BLOCK_SIZE, CPU), kv)
        return target.forward(build_batch([row(40, prompt[40:], TABLE, 1)], BLOCK_SIZE, CPU), kv)

    own, drafted = continued(target), continued(copy)
    assert not torch.equal(own, drafted)
    assert (own - drafted).norm() < 0.05 * own.norm()
    kv = KVStorage(config, BLOCK_SIZE, NUM_BLOCKS, 0, torch.float32, CPU)
    for decoder in (copy, target):  # and what the target writes over it is its own again
        decoder.forward(build_batch([row(0, prompt[:40], TABLE, 1)], BLOCK_SIZE, CPU), kv)
    assert torch.equal(target.forward(build_batch([row(40, prompt[40:], TABLE, 1)], BLOCK_SIZE, CPU), kv), own)
