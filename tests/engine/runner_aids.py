"""Drives a runner by hand, without a scheduler: plans are written out, blocks are dealt from a shuffled deck."""

from __future__ import annotations

import random
from typing import Any

import torch

from engine.batch import build_batch
from engine.config import EngineConfig, LoadedModel
from engine.params import SamplingParams
from engine.plan import Plan, PositionLogprobs, Row, Sampled
from engine.runner import load_runner
from engine.sequence import Request, Sequence


def new_sequences(prompt: list[int], params: SamplingParams | None = None, seed: int = 0, **request: Any) -> Request:
    """A request with its sequences, as the engine makes them."""
    params = params or SamplingParams(temperature=0.0)
    made = Request("r", prompt, params, seed, **request)
    made.sequences = [Sequence(made, choice, seed) for choice in range(params.n)]
    return made


def new_sequence(prompt: list[int], params: SamplingParams | None = None, seed: int = 0, **request: Any) -> Sequence:
    return new_sequences(prompt, params, seed, **request).sequences[0]


class Driver:
    """Keeps block tables for sequences and runs steps of its caller's making."""

    def __init__(self, model: LoadedModel, seed: int = 0) -> None:
        self.model = model
        self.runner: Any = model.runner
        self.free = list(range(model.runner.num_kv_blocks))
        random.Random(seed).shuffle(self.free)
        self.prompt_logprobs: dict[Sequence, list[PositionLogprobs]] = {}

    def row(self, sequence: Sequence, num_tokens: int | None = None, num_logits: int | None = None) -> Row:
        """The sequence's next tokens; draws once nothing is left to compute."""
        start = sequence.num_computed_tokens
        end = sequence.num_tokens if num_tokens is None else min(start + num_tokens, sequence.num_tokens)
        while len(sequence.block_table) * self.runner.block_size < end:
            sequence.block_table.append(self.free.pop())
        is_last = end == sequence.num_tokens
        return Row(
            sequence=sequence,
            start=start,
            token_ids=sequence.tokens(start, end),
            block_table=list(sequence.block_table),
            num_logits=int(is_last) if num_logits is None else num_logits,
            draws=[sequence] if is_last else [],
        )

    def step(self, *rows: Row, **moves: Any) -> list[Sampled]:
        """Executes and commits: computed counts, drawn tokens."""
        result = self.runner.execute(Plan(0, list(rows), **moves))
        for row in rows:
            row.sequence.num_computed_tokens = row.end
        drawn = [sequence for row in rows for sequence in row.draws]
        for sequence, sampled in zip(drawn, result.samples, strict=True):
            if sampled.token_id is not None:
                sequence.output_token_ids.append(sampled.token_id)
        for index, found in result.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(rows[index].sequence, []).extend(found)
        return list(result.samples)

    def generate(self, sequences: list[Sequence], num_tokens: int, chunk: int = 10**9, budget: int = 10**9) -> None:
        """All together: decodes first, then chunks of prompts as far as the step's budget goes."""
        while waiting := [s for s in sequences if s.num_output_tokens < num_tokens]:
            rows, left = [], budget
            for sequence in sorted(waiting, key=lambda s: not s.output_token_ids):
                if left > 0:
                    rows.append(self.row(sequence, min(chunk, left)))
                    left -= len(rows[-1].token_ids)
            self.step(*rows)

    def logits(self, *rows: Row) -> torch.Tensor:
        """The rows' wanted logits, one after another; nothing is drawn or committed."""
        batch = build_batch(list(rows), self.runner.block_size, self.runner.decoder.device)
        found: torch.Tensor = self.runner.decoder.forward(batch, self.runner._kv)
        return found

    def release(self, sequence: Sequence) -> None:
        self.free.extend(sequence.block_table)
        sequence.block_table = []


def load(folder: Any, **config: Any) -> LoadedModel:
    return load_runner(str(folder), EngineConfig(**{"num_kv_blocks": 64, **config}))


def direct_logits(model: LoadedModel, prompt: list[int]) -> torch.Tensor:
    """Logits at every position of `prompt`, computed in one piece."""
    driver = Driver(model)
    return driver.logits(driver.row(new_sequence(prompt), num_logits=len(prompt)))
