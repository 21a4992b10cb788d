"""Each part of a forward on the native CPU path: its roof, what the roofs predict, what it takes.

    python -m bench.ops [--model smollm2-135m] [--threads 1] [--rows 1,4,16,64,256,512] [--out FILE]

Roofs are measured first, on this machine and in this run: products from registers (float32, int8, int8 with weights of
4 bits) and bytes read in order from memory. A part's prediction is the larger of operations / rate and bytes of
weights and KV / bandwidth; of the parts without products, none. Up to 64 rows are sequences that decode over 256
tokens of context, more are one prompt's chunk. Figures are the fastest forward of several, in processor's time of one
of its threads, so that they hold on a machine that others use as well. Prints tables and ends with one JSON line, also
written to --out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bench.machine import machine
from engine.batch import Batch, build_batch
from engine.config import EngineConfig
from engine.kv_storage import KVStorage
from engine.models.config import DecoderConfig
from engine.models.native import NativeDecoder
from engine.models.packed import PackedWeights, WeightsDtype
from engine.params import SamplingParams
from engine.plan import Row
from engine.runner import TorchRunner, load_runner
from engine.sequence import Request, Sequence
from kernels.cpu.library import PHASES, Form, Library, load

CONTEXT, BLOCK_SIZE, MOST_DECODES = 256, 16, 64
SECONDS = 1.0  # of forwards for each figure
DTYPES: tuple[WeightsDtype, ...] = ("float32", "int8")
MATRICES = {  # phase -> matrix
    "qkv": "qkv",
    "attention out": "attention_out",
    "gate and up": "gate_up",
    "down": "down",
    "head": "head",
}


def rate(work: Callable[[], float]) -> float:
    """Of several tries the best, per second of this thread's processor time."""
    best = 0.0
    for _ in range(8):
        start = time.thread_time()
        amount = work()
        best = max(best, amount / (time.thread_time() - start))
    return best


def roofs(library: Library) -> dict[str, float]:
    """Of one thread: operations/s in float32, in int8 and with weights of 4 bits, bytes/s."""
    data = torch.ones(1 << 28, dtype=torch.uint8)
    return {
        "float32": rate(lambda: library.multiply_floats(3_000_000)),
        "int8": rate(lambda: library.multiply_codes(3_000_000)),
        "int4": rate(lambda: library.multiply_codes4(3_000_000)),
        "bytes": rate(lambda: library.read_bytes(data)),
    }


def rows_of(count: int) -> list[Row]:
    """`count` tokens: that many decodes, or a chunk of one prompt."""

    def row(index: int, start: int, num_tokens: int, num_blocks: int) -> Row:
        sequence = Sequence(Request(str(index), [0], SamplingParams(), seed=0), choice=0, seed=0)
        table = list(range(index * num_blocks, (index + 1) * num_blocks))
        return Row(sequence, start, [7 + i % 1000 for i in range(num_tokens)], table, 1)

    if count <= MOST_DECODES:
        return [row(index, CONTEXT, 1, CONTEXT // BLOCK_SIZE + 1) for index in range(count)]
    return [row(0, 0, count, count // BLOCK_SIZE)]


def shapes(config: DecoderConfig) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each product."""
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "qkv": (config.hidden_size, query + 2 * kv),
        "attention out": (query, config.hidden_size),
        "gate and up": (config.hidden_size, 2 * config.intermediate_size),
        "down": (config.intermediate_size, config.hidden_size),
        "head": (config.hidden_size, config.vocab_size),
    }


def predictions(
    config: DecoderConfig, dtype: WeightsDtype, packed: PackedWeights, rows: list[Row], roof: dict[str, float]
) -> dict[str, float]:
    """Seconds of the parts that a roof bounds, over all layers."""
    num_tokens, found = sum(len(row.token_ids) for row in rows), {}
    for phase, (inputs, outputs) in shapes(config).items():
        names = [name for name in packed.forms if name.split(".")[-1] == MATRICES[phase]]
        count = len(rows) if phase == "head" else num_tokens
        rate = roof["float32" if dtype == "float32" else "int4" if packed.forms[names[0]] == Form.GROUPED4 else "int8"]
        compute = len(names) * 2 * count * inputs * outputs / rate
        found[phase] = max(compute, sum(packed.tensors[name].nbytes for name in names) / roof["bytes"])
    seen = sum(position + 1 for row in rows for position in range(row.start, row.end))
    operations = 4 * seen * config.num_heads * config.head_dim
    kv_bytes = sum(8 * row.end * config.num_kv_heads * config.head_dim for row in rows)
    bound = max(operations / roof["float32"], kv_bytes / roof["bytes"])
    return {**found, "attention": config.num_layers * bound}


def measured(decoder: NativeDecoder, batch: Batch, kv: KVStorage) -> dict[str, float]:
    """Seconds by part, of the fastest forward."""
    tries: list[npt.NDArray[np.int64]] = []
    began = time.monotonic()
    while len(tries) < 3 or time.monotonic() - began < SECONDS:
        tries.append(np.zeros(len(PHASES), dtype=np.int64))
        decoder.forward(batch, kv, tries[-1])
    best = min(tries, key=lambda spent: int(spent.sum()))
    return dict(zip(PHASES, (best / 1e9).tolist(), strict=True))


def figures(model: str, dtype: WeightsDtype, threads: int, counts: list[int]) -> Iterator[dict[str, Any]]:
    runner = load_runner(model, EngineConfig(dtype=dtype, num_threads=threads, num_kv_blocks=8)).runner
    assert isinstance(runner, TorchRunner) and isinstance(runner.decoder, NativeDecoder)
    decoder = runner.decoder
    roof = {name: value * threads for name, value in roofs(load()).items()}
    for count in counts:
        rows = rows_of(count)
        num_blocks = 1 + max(block for row in rows for block in row.block_table)
        kv = KVStorage(decoder.config, BLOCK_SIZE, num_blocks, 0, torch.float32, decoder.device)
        found = measured(decoder, build_batch(rows, BLOCK_SIZE, decoder.device), kv)
        predicted = predictions(decoder.config, dtype, decoder.packed, rows, roof)
        yield {
            "dtype": dtype,
            "rows": count,
            "kind": "decode" if count <= MOST_DECODES else "prompt",
            "roofs": {name: round(value / 1e9, 1) for name, value in roof.items()},  # Gop/s, GB/s
            "matrices": decoder.packed.kept(),
            "predicted_ms": {name: round(value * 1e3, 3) for name, value in predicted.items()},
            "measured_ms": {name: round(value * 1e3, 3) for name, value in found.items()},
            "step_ms": round(sum(found.values()) * 1e3, 2),
            "step_predicted_ms": round(sum(predicted.values()) * 1e3, 2),
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ops", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64, 256, 512]
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = []
    for dtype in DTYPES:
        print(f"\n{dtype:<10}{'':>7}" + "".join(f"{name:>16}" for name in (*PHASES, "step")))
        for each in figures(options.model, dtype, options.threads, options.rows):
            found.append(each)
            for title, key in (("predicted", "predicted_ms"), ("measured", "measured_ms")):
                step = each["step_predicted_ms" if key == "predicted_ms" else "step_ms"]
                cells = "".join(f"{each[key].get(name, '-'):>16}" for name in PHASES)
                print(f"{title:<10}{each['rows']:>7}{cells}{step:>16}", flush=True)
    report = {"model": options.model, "threads": options.threads, "variant": load().variant.name, **machine()}
    print(json.dumps({**report, "figures": found}))
    if options.out is not None:
        options.out.write_text(json.dumps({**report, "figures": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
