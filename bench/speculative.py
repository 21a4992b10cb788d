"""What speculation gains on the real model, and that it never loses: every proposer against none, in one run.

    python -m bench.speculative [--batches 1,4,8,32] [--proposers ngram,suffix,self,draft] [--turns 2]
        [--tasks extract,json,verbatim,free summary,free json] [--weights own|bfloat16] [--dtype auto|int8]
        [--clock wall|cpu] [--output FILE]

Tasks over real documents, greedy (bench/extraction.py): an extractive summary and JSON from lines of text, held to it
by a grammar, and both asked for in words alone; how much of a task's output is copied is told. A batch of b keeps b
requests in the engine: where one ends, the next is added, so that the least repetitive one does not decide alone.
`fixed` rows verify always K proposals: the best of them is what adapting is measured against. A draft model cannot be
had for this vocabulary, so `draft` is the target with its last layers left out: what a poor draft costs. The simulated
row is the seed's example: a draft of 2 ms, a target of 50 ms, acceptance 0.7, K = 5, by the real scheduler.

All modes run side by side, each until another of its requests has ended, then the next: what slows the machine for a
minute slows them alike. Of several turns the fastest counts, at batch 1 for each request by itself: so the engine is
warm, rates and costs are learned and grammars, which are checked before the clock runs, are compiled in a turn before.

The model comes in 4 bits, and a lone token's forward reads few bytes. With `--weights bfloat16` its weights are rounded
to what most checkpoints come in. With `--dtype int8` the target computes in int8; `self` is left out, as its draft
would be the target itself.

With `--clock cpu` all is computed by one thread, and times are this process's seconds of processor, for the engine's
own measurements as well: on a machine that others use, too, its ratios still say something.

At batch 1 a second figure leaves out what comes before a request's first token: nothing guesses a prompt.

Bars, over whole requests: the best proposer at least 1.8x at batch 1, also of the two free tasks, where half of what
this model writes is its own and no lookup knows it; none below 0.97x over a run; from batch 4 on at least 0.9 of the
best fixed K; simulated 2.45x +- 0.1. The tokens of all modes are equal. A table, then one JSON line; exit code 1 where
a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.claims import speculation
from bench.extraction import TASKS, share_copied
from bench.machine import machine
from engine import LLM, EngineConfig, SamplingParams
from engine.config import LoadedModel
from engine.guided.grammar import check
from engine.models.draft import load_draft_model
from engine.runner import TorchRunner, load_runner
from engine.weights import resolve

MODEL = "smollm2-135m"
FIXED = (1, 3, 5)
LEAST_BEST, LEAST_WORST, LEAST_OF_FIXED = 1.8, 0.97, 0.9


@dataclass
class Mode:
    """One way to run: a proposer, with adapted or with fixed K."""

    name: str
    llm: LLM
    taken: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # task and batch -> seconds, by piece
    acceptance: dict[tuple[str, int], float] = field(default_factory=dict)
    decoding: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # likewise, behind the first tokens

    def seconds(self, key: tuple[str, int]) -> float:
        return sum(self.taken[key])


class Run:
    """One turn of a mode over a task's requests, of which it keeps `batch` in the engine at once."""

    def __init__(self, mode: Mode, prompts: list[str], params: list[SamplingParams], batch: int, salt: str) -> None:
        self.mode, self._prompts, self._params = mode, prompts, params
        self._batch, self._salt = batch, salt
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._num_added = self._num_ended = 0
        self._first: dict[int, float] = {}  # request -> when its first token came, in this run's own seconds
        self.seconds: list[float] = []  # from one end of a request to the next
        self.decoding: list[float] = []  # of each that ended, behind its first token
        before = mode.llm.stats()
        self._before = before.num_drafted_tokens, before.num_accepted_tokens

    @property
    def has_ended(self) -> bool:
        return self._num_ended == len(self._prompts)

    def advance(self, clock: Callable[[], float]) -> None:
        """Until another request has ended."""
        num_ended, passed, began = self._num_ended, sum(self.seconds), clock()
        while self._num_ended == num_ended:
            while self._num_added < len(self._prompts) and self._num_added - self._num_ended < self._batch:
                index = self._num_added
                self.mode.llm.add_request(str(index), self._prompts[index], self._params[index], salt=self._salt)
                self._num_added += 1
            for delta in self.mode.llm.step():
                index, now = int(delta.request_id), passed + clock() - began
                self.tokens[index] += [token for each in delta.deltas for token in each.token_ids]
                self._first.setdefault(index, now)
                if delta.finished:
                    self._num_ended += 1
                    self.decoding.append(now - self._first[index])
        self.seconds.append(clock() - began)

    @property
    def acceptance(self) -> float:
        after = self.mode.llm.stats()
        drafted, accepted = after.num_drafted_tokens - self._before[0], after.num_accepted_tokens - self._before[1]
        return accepted / drafted if drafted else 0.0


class Bench:
    def __init__(self, folder: Path, dtype: str, clock: str) -> None:
        self._clock = time.process_time if clock == "cpu" else time.perf_counter
        self._num_threads = 1 if clock == "cpu" else None
        self._folder, self._dtype = folder, dtype
        self._loaded = load_runner(str(folder), self._config())
        self.expected: dict[tuple[str, int], list[list[int]]] = {}
        self.copied: dict[str, float] = {}  # task -> share of its output that stands in the prompts
        self.differing = 0

    def _config(self, **changes: Any) -> EngineConfig:
        return EngineConfig(
            dtype=self._dtype,  # type: ignore[arg-type]
            num_kv_blocks=1536,
            enable_prefix_caching=False,
            num_threads=self._num_threads,
            **changes,
        )

    def mode(self, name: str, **changes: Any) -> Mode:
        """Over the same weights, with a pool of its own."""
        config = self._config(**changes)
        assert isinstance(self._loaded.runner, TorchRunner)
        decoder, info = self._loaded.runner.decoder, self._loaded.info
        runner = TorchRunner(decoder, info.max_model_len, 16, 1536, 0, self._loaded.runner._kv.layer(0)[0].dtype)
        for layer in range(decoder.config.num_layers):
            for part in runner._kv.layer(layer):
                part.zero_()  # memory that is touched for the first time while it is measured tells nothing
        draft = load_draft_model(self._folder, decoder, config)
        runner.speculate(None if draft is None else draft.drafter(runner._kv, config, self._clock), rejects=False)
        return Mode(
            name,
            LLM(LoadedModel(runner=runner, tokenizer=self._loaded.tokenizer, info=info), config, clock=self._clock),
        )

    def run(self, modes: list[Mode], task: str, batch: int, count: int, turn: int = 0) -> None:
        """`count` requests with each mode, which nobody remembers from another turn."""
        template = self._loaded.tokenizer.chat_template
        assert template is not None
        asks = TASKS[task](count)
        prompts = [template.render([{"role": "user", "content": each.message}]) for each in asks]
        params = [each.params for each in asks]
        for each in params:
            if each.guided is not None:
                check(each.guided)  # once for all modes, whichever comes first
        runs = [Run(mode, prompts, params, batch, f"{task} {batch} {turn}") for mode in modes]
        chance = random.Random(turn)  # so that no mode always follows the same other
        while going := [run for run in runs if not run.has_ended]:
            for run in chance.sample(going, len(going)):
                run.advance(self._clock)
        for run in runs:
            self._take(run, (task, batch))
        if task not in self.copied:
            encoded = [self._loaded.tokenizer.encode(prompt) for prompt in prompts]
            shares = [share_copied(*each) for each in zip(encoded, runs[0].tokens, strict=True)]
            self.copied[task] = sum(shares) / count

    def _take(self, run: Run, key: tuple[str, int]) -> None:
        mode = run.mode
        print(f"{key[0]}, batch {key[1]}: {mode.name} {sum(run.seconds):.2f} s", file=sys.stderr, flush=True)
        self.differing += run.tokens != self.expected.setdefault((key[0], len(run.tokens)), run.tokens)
        if key[1] > 1:  # requests mingle, and end in another order each time
            run.seconds, run.decoding = [sum(run.seconds)], [sum(run.decoding)]
        for taken, new in ((mode.taken, run.seconds), (mode.decoding, run.decoding)):
            taken[key] = [min(pair) for pair in zip(taken.get(key, new), new, strict=True)]
        mode.acceptance[key] = run.acceptance


def copied(folder: Path, target: Path, *, num_layers: int | None = None, dtype: torch.dtype | None = None) -> Path:
    """The model of `folder` as a folder of its own: with its first layers alone, or its weights rounded."""
    config = json.loads((folder / "config.json").read_text())
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    for path in folder.glob("*.json"):
        if path.name not in ("config.json", "millstream.json") and not path.name.endswith(".index.json"):
            (target / path.name).write_text(path.read_text())
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                parts = name.split(".")
                if num_layers is None or "layers" not in parts or int(parts[parts.index("layers") + 1]) < num_layers:
                    tensor = opened.get_tensor(name)
                    tensors[name] = tensor if dtype is None else tensor.to(dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def modes_of(bench: Bench, proposers: list[str], batches: list[int], draft: str) -> Iterator[Mode]:
    yield bench.mode("none", speculative="none")
    for name in proposers:
        model = {"speculative_model": draft} if name == "draft" else {}
        yield bench.mode(name, speculative=name, **model)
    if max(batches) >= 4 and "ngram" in proposers:
        for depth in FIXED:
            fixed = {"num_speculative_tokens": depth, "speculative_adaptive": False}
            yield bench.mode(f"ngram fixed {depth}", speculative="ngram", **fixed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speculative", description=__doc__)
    parser.add_argument("--batches", default="1,4,8,32")
    parser.add_argument("--proposers", default="ngram,suffix,self,draft")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also add the JSON line to this file")
    parser.add_argument("--weights", choices=["own", "bfloat16"], default="own")
    parser.add_argument("--dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    tasks = options.tasks.split(",")
    if unknown := set(tasks) - set(TASKS):
        parser.error(f"--tasks: unknown {', '.join(sorted(unknown))}; choose of {', '.join(TASKS)}")
    batches = [int(each) for each in options.batches.split(",")]
    proposers = [each for each in options.proposers.split(",") if options.dtype != "int8" or each != "self"]
    if not proposers:
        parser.error("--dtype int8 leaves no proposer: self drafts for float32 alone")
    with TemporaryDirectory() as name:
        model = resolve(MODEL)
        if options.weights == "bfloat16":
            model = copied(model, Path(name) / "rounded", dtype=torch.bfloat16)
        bench = Bench(model, options.dtype, options.clock)
        draft = str(copied(model, Path(name) / "short", num_layers=8)) if "draft" in proposers else ""
        modes = list(modes_of(bench, proposers, batches, draft))
    bench.run(modes, "json", 1, 1)  # the first touch of memory
    for mode in modes:
        mode.taken.clear()
        mode.decoding.clear()
    bench.copied.clear()
    for batch in batches:
        for task in tasks:
            for turn in range(options.turns):
                wanted = [mode for mode in modes if batch >= 4 or "fixed" not in mode.name]
                bench.run(wanted, task, batch, max(12, (2 if batch > 8 else 3) * batch), turn)
    report = {
        "weights": options.weights,
        "dtype": options.dtype,
        "copied": {task: round(share, 3) for task, share in bench.copied.items()},
        **reported(modes, tasks, batches, bench.differing, options.clock),
    }
    print("copied from the prompt: " + ", ".join(f"{task} {share:.0%}" for task, share in bench.copied.items()))
    for claim, measured, is_met in report["bars"]:
        print(f"{'ok  ' if is_met else 'MISS'} {claim:<70} {measured}")
    line = json.dumps(report)
    print(line)
    if options.output:
        with options.output.open("a") as file:
            file.write(line + "\n")
    return 0 if all(is_met for *_, is_met in report["bars"]) else 1


def reported(modes: list[Mode], tasks: list[str], batches: list[int], differing: int, clock: str) -> dict[str, Any]:
    none = modes[0]
    speedups: dict[str, dict[str, float]] = {}
    acceptance: dict[str, dict[str, float]] = {}
    for mode in modes[1:]:
        for key in mode.taken:
            cell = f"{key[0]}, batch {key[1]}"
            speedups.setdefault(mode.name, {})[cell] = round(none.seconds(key) / mode.seconds(key), 3)
            acceptance.setdefault(mode.name, {})[cell] = round(mode.acceptance[key], 3)
    cells = [f"{task}, batch {batch}" for batch in batches for task in tasks]
    print(f"{'':<16}" + "".join(f"{cell:>24}" for cell in cells))
    for name, row in speedups.items():
        print(f"{name:<16}" + "".join(f"{row[cell]:>16.2f}x ({acceptance[name][cell]:>4.0%})" if cell in row else
                                      f"{'':>24}" for cell in cells))  # fmt: skip
    decoding = {
        mode.name: {task: round(sum(none.decoding[task, 1]) / sum(mode.decoding[task, 1]), 3) for task in tasks}
        for mode in modes[1:]
        if 1 in batches and (tasks[0], 1) in mode.taken
    }
    for name, row in decoding.items():
        print(f"{name:<16} batch 1, from the first token on: " + ", ".join(f"{k} {v:.2f}x" for k, v in row.items()))
    simulated = speculation.simulated()
    adapted = {name: row for name, row in speedups.items() if "fixed" not in name}
    whole = {
        mode.name: sum(map(none.seconds, none.taken)) / sum(map(mode.seconds, mode.taken))
        for mode in modes[1:]
        if "fixed" not in mode.name
    }
    bars: list[tuple[str, str, bool]] = []
    if 1 in batches:
        for task in tasks:
            best = max(row[f"{task}, batch 1"] for row in adapted.values())
            bars.append((f"{task}, batch 1: the best proposer at least 1.8x", f"{best:.2f}x", best >= LEAST_BEST))
    least = min(whole.values())
    bars.append(("over the whole run, the worst proposer at least 0.97x", f"{least:.2f}x", least >= LEAST_WORST))
    for batch in [each for each in batches if each >= 4 and "ngram" in adapted]:
        keys = [(task, batch) for task in tasks]
        took = {mode.name: sum(map(mode.seconds, keys)) for mode in modes}
        share = min(seconds for name, seconds in took.items() if name == "none" or "fixed" in name) / took["ngram"]
        bars.append(
            (f"ngram, batch {batch}: at least 0.9 of the best fixed K", f"{share:.2f}", share >= LEAST_OF_FIXED)
        )
    low, high = simulated["bar"]
    bars.append(("simulated: 2.45x +- 0.1", f"{simulated['speedup']:.2f}x", low <= simulated["speedup"] <= high))
    bars.append(("runs whose tokens differ from those without speculation", str(differing), differing == 0))
    return {
        "machine": machine(),
        "clock": clock,
        "model": MODEL,
        "seconds_without": {
            f"{task}, batch {batch}": round(none.seconds((task, batch)), 2) for task, batch in none.taken
        },
        "speedups": speedups,
        "decoding_alone_batch_1": decoding,
        "acceptance": acceptance,
        "whole_run": {name: round(value, 3) for name, value in whole.items()},
        "simulated": simulated,
        "bars": bars,
    }


if __name__ == "__main__":
    sys.exit(main())
