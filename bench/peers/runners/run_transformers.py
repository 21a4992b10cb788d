"""transformers' `generate` in static batches of 8, padded on the left."""

import time

import telling
import torch
from transformers import AutoModelForCausalLM

BATCH, PAD = 8, 2

options = telling.parser(__doc__).parse_args()
began = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
ready = time.perf_counter() - began


@torch.inference_mode()
def generate(items: list[telling.Item]) -> list[list[int]]:
    """One batch runs until its longest output is made; what the others made beyond theirs is cut off."""
    longest, steps = max(len(item["prompt_ids"]) for item in items), max(item["max_tokens"] for item in items)
    pads = [longest - len(item["prompt_ids"]) for item in items]
    ids = torch.tensor([[PAD] * pad + item["prompt_ids"] for pad, item in zip(pads, items, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False
    )
    return [row[longest : longest + item["max_tokens"]] for row, item in zip(made.tolist(), items, strict=True)]


def run(items: list[telling.Item]) -> list[list[int]]:
    return [outputs for at in range(0, len(items), BATCH) for outputs in generate(items[at : at + BATCH])]


telling.measure("transformers-float32", ready, telling.workloads_of(options), run, options.outputs)
