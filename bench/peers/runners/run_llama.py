"""llama.cpp through its C API: 32 slots, continuous batching, prompts and decodes of all slots in one batch."""

import ctypes
import os
import time
from pathlib import Path

import llama_cpp
import numpy as np
import telling

SLOTS, SLOT_CONTEXT = 32, 1024
BATCH, PART = 2048, 512  # tokens of one call, and of one pass through the model inside it

options = telling.parser(__doc__).parse_args()
silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
began = time.perf_counter()
llama_cpp.llama_backend_init()
model = llama_cpp.llama_model_load_from_file(options.model.encode(), llama_cpp.llama_model_default_params())
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_seq_max, params.kv_unified = SLOTS * SLOT_CONTEXT, SLOTS, False
params.n_batch, params.n_ubatch = BATCH, PART
params.n_threads = params.n_threads_batch = os.cpu_count()
context = llama_cpp.llama_init_from_model(model, params)
ready = time.perf_counter() - began
vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
memory = llama_cpp.llama_get_memory(context)
batch = llama_cpp.llama_batch_init(BATCH, 0, 1)


def put(token_id: int, position: int, slot: int, wants_logits: bool) -> None:
    at = batch.n_tokens
    batch.token[at], batch.pos[at], batch.n_seq_id[at] = token_id, position, 1
    batch.seq_id[at][0], batch.logits[at] = slot, wants_logits
    batch.n_tokens += 1


def run(items: list[telling.Item]) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in items]
    waiting, free = list(reversed(range(len(items)))), list(range(SLOTS))
    running: dict[int, int] = {}  # slot -> item
    while waiting or running:
        batch.n_tokens = 0
        wanted: list[tuple[int, int]] = []  # (place in the batch, slot)
        for slot, item in running.items():
            put(outputs[item][-1], len(items[item]["prompt_ids"]) + len(outputs[item]) - 1, slot, True)
            wanted.append((batch.n_tokens - 1, slot))
        while waiting and free and batch.n_tokens + len(items[waiting[-1]]["prompt_ids"]) <= BATCH:
            item, slot = waiting.pop(), free.pop()
            prompt = items[item]["prompt_ids"]
            for position, token_id in enumerate(prompt):
                put(token_id, position, slot, position == len(prompt) - 1)
            running[slot] = item
            wanted.append((batch.n_tokens - 1, slot))
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        for place, slot in wanted:
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, place), shape=(vocab_size,))
            item = running[slot]
            outputs[item].append(int(logits.argmax()))
            if len(outputs[item]) == items[item]["max_tokens"]:
                llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)
                del running[slot]
                free.append(slot)
    return outputs


form = Path(options.model).stem
telling.measure(f"llama.cpp-{form}", ready, telling.workloads_of(options), run, options.outputs)
