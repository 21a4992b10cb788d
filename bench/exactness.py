"""Tokens never change: one matrix of what may share an engine with a request, against the request alone.

    python -m bench.exactness [--model NAME] [--kernels auto|torch] [--dtype auto|int8] [--kv-cache-dtype auto|int8]
        [--tokens 24] [--speculative all|ngram,suffix,self,draft] [--kinds greedy,seeded,...]

Each cell is one condition (batch, chunk, block size, cache, small pool, swap, aborts, continuation, ...) with one kind
of request (greedy, seeded, penalties, stops, n = 4, ...) over prompts of many lengths. Compared with the same request
alone in a cold engine: token ids, text, finish_reason, stop_reason, logprobs. On the native path nothing is forgiven.
On torch a first divergence is forgiven where the two tokens' noised scores are within 1e-3 of each other (a near tie);
more than 1% of forgiven choices fails. Ends with one JSON line; exit code 1 on a mismatch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from bench.extraction import RECORDS
from engine import LLM, EngineConfig, SamplingParams
from engine.collector import Collector
from engine.config import LoadedModel
from engine.kv_storage import block_bytes
from engine.models.draft import DraftModel, load_draft_model
from engine.noise import gumbel_noise_of
from engine.outputs import Choice, RequestOutput
from engine.params import Guided
from engine.processors import processed
from engine.runner import GIB, TorchRunner, load_runner, speculate
from engine.sequence import Request, Sequence
from engine.weights import resolve

CORPUS = Path(__file__).parent / "corpus"
LENGTHS = (1, 7, 15, 16, 17, 33, 64, 130, 300)  # prompt tokens: at and beside the borders of blocks
NEAR_TIE = 1e-3
MAX_FORGIVEN = 0.01

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.9, "seed": 6, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.7,
        "seed": 7,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "min_tokens": {"temperature": 0.8, "seed": 8, "min_tokens": 10, "logit_bias": {2: 6.0}, "ignore_eos": False},
    "stop": {"temperature": 0.0, "stop": [" the", "\n", "."], "min_tokens": 3},
    "guided": {"temperature": 0.8, "seed": 11, "n": 2, "guided": Guided(json=RECORDS), "ignore_eos": False},
    "n4": {"temperature": 1.0, "seed": 9, "n": 4},
    "best_of": {"temperature": 1.0, "seed": 10, "n": 2, "best_of": 4},
    "beams": {"use_beam_search": True, "n": 4, "length_penalty": 0.7},
    "ended_beams": {
        "use_beam_search": True,
        "n": 3,
        "early_stopping": "never",
        "length_penalty": 2.0,
        "repetition_penalty": 1.1,
        "stop": ["\n", "."],
        "min_tokens": 3,
    },
}


@dataclass
class Case:
    prompt: list[int]
    params: SamplingParams
    alone: RequestOutput


@dataclass
class Report:
    cells: int = 0
    choices: int = 0
    tokens: int = 0
    mismatches: int = 0
    near_ties: int = 0
    preemptions: int = 0
    swaps: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    first: list[str] = field(default_factory=list)


class Bench:
    def __init__(self, model: str, num_tokens: int, **settings: str) -> None:
        self._base: dict[str, Any] = {**settings, "max_num_seqs": 64, "num_kv_blocks": 1024}
        self._model = model
        loaded = load_runner(model, EngineConfig(**self._base))
        self.is_native = loaded.info.kernels.startswith("native")
        self.kernels, self.dtype = loaded.info.kernels, loaded.info.dtype
        self.kv_dtype = loaded.info.kv_dtype
        self._kv_dtype: torch.dtype = getattr(torch, self.kv_dtype)
        self._loaded = loaded
        self._tokenizer = loaded.tokenizer
        self.num_tokens = num_tokens
        self.report = Report()
        self._draft_models: dict[str, DraftModel | None] = {}

    def engine(self, **changes: Any) -> LLM:
        """A cold engine over the same weights."""
        config = EngineConfig(**{**self._base, "enable_prefix_caching": False, **changes})
        assert isinstance(self._loaded.runner, TorchRunner)
        decoder = self._loaded.runner.decoder
        runner = TorchRunner(
            decoder,
            self._loaded.info.max_model_len,
            config.block_size,
            num_kv_blocks=config.num_kv_blocks or 1024,
            num_host_slots=int(config.swap_space * GIB)
            // block_bytes(decoder.config, config.block_size, self._kv_dtype),
            dtype=self._kv_dtype,
        )
        speculate(runner, config, self._draft_model(config))
        return LLM(LoadedModel(runner=runner, tokenizer=self._tokenizer, info=self._loaded.info), config)

    def _draft_model(self, config: EngineConfig) -> DraftModel | None:
        """Loaded once for all engines."""
        name = config.speculative
        if name not in self._draft_models:
            assert isinstance(self._loaded.runner, TorchRunner)
            model = load_draft_model(resolve(self._model), self._loaded.runner.decoder, config)
            self._draft_models[name] = model
        return self._draft_models[name]

    def prompts(self) -> list[list[int]]:
        text = "\n".join(path.read_text() for path in sorted(CORPUS.glob("*.txt")))
        ids = self._tokenizer.encode(text[:40_000])
        prompts, start = [], 0
        for length in LENGTHS:
            prompts.append(ids[start : start + length])
            start += length
        return [*prompts, prompts[-1][:200] + prompts[-2][:40]]  # and one that shares a long prefix

    def cases(self, kind: dict[str, Any]) -> list[Case]:
        params = SamplingParams(**{"max_tokens": self.num_tokens, "ignore_eos": True, "logprobs": 5, **kind})
        cases = []
        for prompt in self.prompts():
            llm = self.engine(speculative="none")
            cases.append(Case(prompt, params, llm.generate([{"prompt_token_ids": prompt}], params)[0]))
        return cases

    def compare(self, name: str, cases: list[Case], outputs: list[RequestOutput]) -> None:
        self.report.cells += 1
        for index, (case, output) in enumerate(zip(cases, outputs, strict=True)):
            for alone, found in zip(case.alone.choices, output.choices, strict=True):
                self.report.choices += 1
                self.report.tokens += len(alone.token_ids)
                if self._is_same(alone, found):
                    continue
                if not self.is_native and self._is_near_tie(case, alone, found):
                    self.report.near_ties += 1
                    continue
                self.report.mismatches += 1
                if len(self.report.first) < 5:
                    self.report.first.append(f"{name}, prompt {index}, choice {alone.index}: {alone} against {found}")

    def _is_same(self, alone: Choice, found: Choice) -> bool:
        facts = ("token_ids", "text", "finish_reason", "stop_reason")
        if any(getattr(alone, fact) != getattr(found, fact) for fact in facts):
            return False
        if self.is_native:
            return (alone.logprobs, alone.score) == (found.logprobs, found.score)
        return all(
            abs(one.chosen.logprob - other.chosen.logprob) < 1e-4
            for one, other in zip(alone.logprobs or [], found.logprobs or [], strict=True)
        )

    def _is_near_tie(self, case: Case, alone: Choice, found: Choice) -> bool:
        """Whether the first token in which they part was nearly as good as the other; of ranked choices, the whole."""
        if alone.score is not None and found.score is not None:
            return abs(alone.score - found.score) < NEAR_TIE
        pairs = zip(alone.token_ids, found.token_ids, strict=False)
        at = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        if at is None or alone.logprobs is None:
            return False
        known = {top.token_id: top.logprob for top in (alone.logprobs[at].chosen, *alone.logprobs[at].top)}
        rivals = (alone.token_ids[at], found.token_ids[at])
        if any(token_id not in known for token_id in rivals):
            return False
        logits = torch.full((self._loaded.info.vocab_size,), -1e30)
        for token_id, logprob in known.items():
            logits[token_id] = logprob
        seed = case.params.seed or 0
        sequence = Sequence(
            Request("tie", case.prompt, case.params, seed), alone.index, seed, list(alone.token_ids[:at])
        )
        scores = processed(logits, sequence)
        noise = gumbel_noise_of(seed, alone.index, at, torch.tensor(rivals).numpy())
        noised = [
            float(scores[token]) + case.params.temperature * float(g) for token, g in zip(rivals, noise, strict=True)
        ]
        return abs(noised[0] - noised[1]) < NEAR_TIE


def run_together(llm: LLM, cases: list[Case], *, every: int = 0) -> list[RequestOutput]:
    """All cases in one engine; `every` steps between arrivals."""
    collectors: dict[str, Collector] = {}
    waiting = list(enumerate(cases))
    step = 0
    while waiting or llm.has_unfinished():
        while waiting and (not every or step >= every * (len(cases) - len(waiting))):
            index, case = waiting.pop(0)
            collectors[str(index)] = add(llm, str(index), case)
        for delta in llm.step():
            if delta.request_id in collectors:
                collectors[delta.request_id].add(delta)
        step += 1
    llm.check_integrity()
    return [collectors[str(index)].output() for index in range(len(cases))]


def add(llm: LLM, request_id: str, case: Case, emitted: list[list[int]] | None = None) -> Collector:
    llm.add_request(request_id, {"prompt_token_ids": case.prompt}, case.params, emitted=emitted)
    return Collector(request_id, case.prompt, case.params.n)


def among_aborted(llm: LLM, cases: list[Case]) -> list[RequestOutput]:
    """Each case among neighbours that are aborted while it runs."""
    collectors = {}
    for index, case in enumerate(cases):
        collectors[str(index)] = add(llm, str(index), case)
        llm.add_request(f"gone-{index}", {"prompt_token_ids": [*case.prompt[::-1], 11]}, SamplingParams(max_tokens=64))
    step = 0
    while llm.has_unfinished():
        for delta in llm.step():
            if delta.request_id in collectors:
                collectors[delta.request_id].add(delta)
        if step < len(cases):
            llm.abort(f"gone-{step}")
        step += 1
    llm.check_integrity()
    return [collectors[str(index)].output() for index in range(len(cases))]


def continued(llm: LLM, cases: list[Case]) -> list[RequestOutput]:
    """Each case as another engine left it: some tokens of each choice are emitted already."""
    collectors = {}
    for index, case in enumerate(cases):
        emitted = [c.token_ids[: (3 + 5 * c.index) % (len(c.token_ids) + 1)] for c in case.alone.choices]
        if case.params.is_held_back:
            emitted = []  # nothing is told before the end: another engine begins anew
        collectors[str(index)] = add(llm, str(index), case, emitted)
    while llm.has_unfinished():
        for delta in llm.step():
            collectors[delta.request_id].add(delta)
    llm.check_integrity()
    return [with_beginning(collectors[str(index)].output(), case.alone) for index, case in enumerate(cases)]


def with_beginning(rest: RequestOutput, alone: RequestOutput) -> RequestOutput:
    """What a continuation told, behind what was told before it."""
    for found, whole in zip(rest.choices, alone.choices, strict=True):
        num_before = len(whole.token_ids) - len(found.token_ids)
        found.token_ids = whole.token_ids[:num_before] + found.token_ids
        found.text = whole.text[: len(whole.text) - len(found.text)] + found.text
        found.logprobs = (whole.logprobs or [])[:num_before] + (found.logprobs or [])
    return rest


Condition = Callable[[Bench, list[Case]], tuple[LLM, list[RequestOutput]]]


def together(every: int = 0, **changes: Any) -> Condition:
    def run(bench: Bench, cases: list[Case]) -> tuple[LLM, list[RequestOutput]]:
        llm = bench.engine(**changes)
        return llm, run_together(llm, cases, every=every)

    return run


def alone_again(bench: Bench, cases: list[Case]) -> tuple[LLM, list[RequestOutput]]:
    llm = bench.engine()
    return llm, [run_together(llm, [case])[0] for case in cases]


def warm(bench: Bench, cases: list[Case]) -> tuple[LLM, list[RequestOutput]]:
    llm = bench.engine(enable_prefix_caching=True)
    run_together(llm, cases)
    return llm, run_together(llm, cases)


def partly_warm(bench: Bench, cases: list[Case]) -> tuple[LLM, list[RequestOutput]]:
    llm = bench.engine(enable_prefix_caching=True, block_size=8)
    for case in cases:
        params = msgspec.structs.replace(case.params, max_tokens=1, min_tokens=0, stop=[])
        run_together(llm, [Case(case.prompt[: 2 * len(case.prompt) // 3 + 1], params, case.alone)])
    return llm, run_together(llm, cases)


def aborted(bench: Bench, cases: list[Case]) -> tuple[LLM, list[RequestOutput]]:
    llm = bench.engine()
    return llm, among_aborted(llm, cases)


def carried_on(bench: Bench, cases: list[Case]) -> tuple[LLM, list[RequestOutput]]:
    llm = bench.engine()
    return llm, continued(llm, cases)


def carried_on_with(**changes: Any) -> Condition:
    def run(bench: Bench, cases: list[Case]) -> tuple[LLM, list[RequestOutput]]:
        llm = bench.engine(**changes)
        return llm, continued(llm, cases)

    return run


def conditions() -> Iterator[tuple[str, Condition]]:
    yield "alone", alone_again
    yield "batch", together()
    yield "arriving", together(every=2)
    for chunk in (16, 40, 100, 256):
        yield f"chunk-{chunk}", together(max_num_batched_tokens=chunk, max_num_seqs=16)
    for block_size in (8, 32, 64):
        yield f"block-{block_size}", together(block_size=block_size)
    yield "cache-cold", together(enable_prefix_caching=True)
    yield "cache-warm", warm
    yield "cache-partial", partly_warm
    yield "small-pool-recompute", together(num_kv_blocks=34, preemption_mode="recompute")
    yield "small-pool-swap", together(num_kv_blocks=34, preemption_mode="swap", swap_space=0.2)
    yield "small-pool-cache", together(num_kv_blocks=34, enable_prefix_caching=True)
    yield "neighbours-aborted", aborted
    yield "continued", carried_on


def speculative_conditions(proposers: list[str], draft: str) -> Iterator[tuple[str, Condition]]:
    """Each proposer in company, in turns with prefill, under pressure, over cached prefixes and as a continuation.

    `draft`: a model that drafts; the target itself shows all that is accepted, its int8 copy what is rejected, too.
    """
    for proposer in proposers:
        given = {"speculative": proposer, "num_speculative_tokens": 4, "speculative_adaptive": False}
        if proposer == "draft":
            given["speculative_model"] = draft
        yield f"{proposer}-batch", together(**given)
        yield f"{proposer}-arriving", together(every=2, **given)
        yield f"{proposer}-adaptive", together(every=2, **{**given, "speculative_adaptive": True})
        yield f"{proposer}-chunk-40", together(max_num_batched_tokens=40, max_num_seqs=16, **given)
        yield f"{proposer}-cache", together(enable_prefix_caching=True, block_size=8, **given)
        yield f"{proposer}-recompute", together(num_kv_blocks=34, preemption_mode="recompute", **given)
        yield f"{proposer}-swap", together(num_kv_blocks=34, preemption_mode="swap", swap_space=0.2, **given)
        yield f"{proposer}-continued", carried_on_with(**given)


def wanted(speculative: str | None, model: str) -> Iterator[tuple[str, Condition]]:
    if speculative is None:
        return conditions()
    proposers = ["ngram", "suffix", "self", "draft"] if speculative == "all" else speculative.split(",")
    return speculative_conditions(proposers, draft=model)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kernels", choices=["auto", "native", "torch"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "int8"], default="auto")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "int8"], default="auto")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--speculative", help="only this: proposers by name, or all, each against none")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of requests")
    options = parser.parse_args()
    if unknown := set(options.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds: unknown {', '.join(sorted(unknown))}; choose of {', '.join(KINDS)}")
    bench = Bench(
        options.model,
        options.tokens,
        cpu_kernels=options.kernels,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    report = bench.report
    began = time.monotonic()
    for kind in options.kinds.split(","):
        params = KINDS[kind]
        cases = bench.cases(params)
        for name, condition in wanted(options.speculative, options.model):
            before = report.mismatches
            llm, outputs = condition(bench, cases)
            bench.compare(f"{name}/{kind}", cases, outputs)
            stats = llm.stats()
            report.preemptions += stats.num_preempted_recompute
            report.swaps += stats.num_preempted_swap
            report.cached_tokens += stats.num_prefix_hit_tokens
            report.drafted_tokens += stats.num_drafted_tokens
            report.accepted_tokens += stats.num_accepted_tokens
            verdict = "equal" if report.mismatches == before else "MISMATCH"
            print(f"{kind:>12}  {name:<22} {verdict}", flush=True)
    for line in report.first:
        print(line)
    is_good = report.mismatches == 0 and report.near_ties <= MAX_FORGIVEN * report.choices
    facts = {name: value for name, value in vars(report).items() if name != "first"}
    seconds = round(time.monotonic() - began, 1)
    print(
        json.dumps(
            {
                "model": options.model,
                "kernels": bench.kernels,
                "dtype": bench.dtype,
                "kv_dtype": bench.kv_dtype,
                **facts,
                "seconds": seconds,
            }
        )
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
