"""Whether greedy outputs are transformers' own: each token must be the model's first choice behind those before it.

    check_transformers.py MODEL --workloads NAME=FILE ... --outputs FOLDER

A token that is not, but whose logit lies within 1e-3 of the first's, is a near tie: its sequence is compared no
further. Prints one JSON line for each workload; `wrong` counts sequences with a token that is neither.
"""

import json

import telling
import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-3

options = telling.parser(__doc__).parse_args()
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()


@torch.inference_mode()
def verdict(prompt_ids: list[int], outputs: list[int]) -> str:
    ids = torch.tensor([prompt_ids + outputs])
    logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    made = torch.tensor(outputs)
    differs = logits.argmax(-1) != made
    if not differs.any():
        return "equal"
    first = int(differs.nonzero()[0])
    gap = float(logits[first].max() - logits[first, made[first]])
    return "near_tie" if gap < NEAR_TIE else "wrong"


for name, items in telling.workloads_of(options).items():
    outputs = json.loads((options.outputs / f"{name}.json").read_text())
    verdicts = [verdict(item["prompt_ids"], made) for item, made in zip(items, outputs, strict=True)]
    counts = {kind: verdicts.count(kind) for kind in ("equal", "near_tie", "wrong")}
    print(json.dumps({"workload": name, **counts}), flush=True)
