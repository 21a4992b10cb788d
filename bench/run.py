"""Our engine over a workload, as one JSON line: greedy, end of sequence ignored, everything submitted at once.

    python -m bench.run [--workload bulk32|FILE] [--model smollm2-135m] [--kernels auto|native|torch]

`ready_s`: until the engine can serve, the process's own start left out; `single_s`: the first prompt alone, 64 tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time

from bench import workload


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument("--workload", default="bulk32")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kernels", choices=["auto", "native", "torch"], default="auto")
    options = parser.parse_args()
    began = time.perf_counter()
    from engine import LLM, EngineConfig, SamplingParams

    llm = LLM(
        options.model,
        EngineConfig(cpu_kernels=options.kernels, enable_prefix_caching=False, kv_cache_memory_bytes=2 << 30),
    )
    ready = time.perf_counter() - began
    work = workload.load(options.workload, llm.tokenizer)

    def run(items: list[workload.Item]) -> tuple[list[list[int]], float]:
        prompts = [{"prompt_token_ids": item["prompt_ids"]} for item in items]
        params = [SamplingParams(temperature=0.0, max_tokens=item["max_tokens"], ignore_eos=True) for item in items]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        return [output.choices[0].token_ids for output in outputs], time.perf_counter() - start

    run([{"prompt_ids": item["prompt_ids"], "max_tokens": 4} for item in work[:2]])  # first touch of memory
    outputs, seconds = run(work)
    _, single = run([{"prompt_ids": work[0]["prompt_ids"], "max_tokens": 64}])
    made = sum(map(len, outputs))
    total = made + sum(len(item["prompt_ids"]) for item in work)
    print(
        json.dumps(
            {
                "peer": f"millstream-{llm.info.dtype}",
                "kernels": llm.info.kernels,
                "seconds": round(seconds, 2),
                "output_tokens": made,
                "total_tokens_per_s": round(total / seconds, 1),
                "ready_s": round(ready, 2),
                "single_s": round(single, 2),
                "tokens_sha256": hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:16],
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
