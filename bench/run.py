"""Our engine over workloads, one JSON line each, as the peers' runners print: greedy, end of sequence ignored, all
submitted at once, no prefix cache.

    python -m bench.run [--workload w32|bulk32|FILE ...] [--dtype float32] [--kernels auto|native|torch]
        [--numerics auto|invariant|fast] [--speculative auto|none]

`ready_s`: until the engine can serve, the process's own start left out; `single_s`: the first prompt alone, 64 tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench import workload
from bench.peers.runners import telling


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--workload", nargs="+", default=["bulk32"], help="w32, bulk32 or a file, named by its stem")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kernels", choices=["auto", "native", "torch"], default="auto")
    parser.add_argument("--numerics", choices=["auto", "invariant", "fast"], default="auto")
    parser.add_argument("--speculative", default="auto", help="what guesses; none: what guessing gains")
    parser.add_argument("--outputs", type=Path, help="folder for each workload's token ids, as NAME.json")
    options = parser.parse_args()
    began = time.perf_counter()
    from engine import LLM, EngineConfig, SamplingParams

    config = EngineConfig(
        dtype=options.dtype,
        cpu_kernels=options.kernels,
        numerics=options.numerics,
        speculative=options.speculative,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2 << 30,
    )
    llm = LLM(options.model, config)
    ready_seconds = time.perf_counter() - began
    workloads = {Path(name).stem: workload.load(name, llm.tokenizer) for name in options.workload}

    def run(items: list[telling.Item]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": item["prompt_ids"]} for item in items]
        params = [SamplingParams(temperature=0.0, max_tokens=item["max_tokens"], ignore_eos=True) for item in items]
        return [output.choices[0].token_ids for output in llm.generate(prompts, params)]

    telling.measure(f"millstream-{llm.info.dtype}", ready_seconds, workloads, run, options.outputs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
