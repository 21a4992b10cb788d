"""vLLM on the CPU: continuous batching, no prefix cache, as many tokens a step as its own benchmarks take."""

import os
import time

import telling

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = telling.parser(__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="do not compile: ready sooner, slower after")
    options = parser.parse_args()
    began = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        enforce_eager=options.eager,
    )
    ready = time.perf_counter() - began

    def run(items: list[telling.Item]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": item["prompt_ids"]} for item in items]
        params = [SamplingParams(temperature=0, max_tokens=item["max_tokens"], ignore_eos=True) for item in items]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]

    peer = f"vllm-{options.dtype}-{'eager' if options.eager else 'compiled'}"
    telling.measure(peer, ready, telling.workloads_of(options), run, options.outputs)


if __name__ == "__main__":  # vLLM may start processes that import this file again
    main()
