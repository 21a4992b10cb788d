"""What beam search must find, from transformers and by looking at every sequence there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.outputs import Choice


class Found(NamedTuple):
    """One hypothesis: its tokens, the stop token included, and its score."""

    token_ids: list[int]
    score: float


def theirs(folder: Path) -> Any:
    """The model as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def generated(model: Any, prompt: list[int], width: int, stops: list[int], **options: Any) -> list[Found]:
    """transformers' own beam search, best first; `options` are those of its `generate`."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        eos_token_id=stops or -1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    outputs = [sequence[len(prompt) :] for sequence in made.sequences.tolist()]
    return [
        Found(without_padding(output, stops), score)
        for output, score in zip(outputs, made.sequences_scores.tolist(), strict=True)
    ]


def without_padding(output: list[int], stops: Iterable[int]) -> list[int]:
    """Behind a stop token there is only padding."""
    ended = [index for index, token_id in enumerate(output) if token_id in stops]
    return output[: ended[0] + 1] if ended else output


@torch.no_grad()
def all_sequences(
    model: Any, prompt: list[int], stops: list[int], *, max_tokens: int, length_penalty: float
) -> list[Found]:
    """Every sequence that ends at a stop token or at `max_tokens`, best first."""
    found = []
    for length in range(1, max_tokens + 1):
        outputs = [
            list(tail)
            for tail in itertools.product(range(model.config.vocab_size), repeat=length)
            if (tail[-1] in stops or length == max_tokens) and not set(tail[:-1]) & set(stops)
        ]
        logits = model(torch.tensor([prompt + output for output in outputs])).logits[:, len(prompt) - 1 : -1]
        drawn = logits.log_softmax(-1).gather(2, torch.tensor(outputs)[:, :, None])
        scores = (drawn.squeeze(-1).sum(-1) / length**length_penalty).tolist()
        found += map(Found, outputs, scores)
    return sorted(found, key=lambda each: -each.score)


def assert_same(choices: list[Choice], expected: list[Found], *, tolerance: float = 1e-4) -> None:
    """Sequences and scores, best first; two whose scores lie closer than `tolerance` may stand either way."""
    assert [choice.score for choice in choices] == sorted((choice.score or 0.0 for choice in choices), reverse=True)
    assert len(choices) == len(expected)
    for choice, other in zip(choices, expected, strict=True):
        assert choice.score is not None
        assert abs(choice.score - other.score) < tolerance, (choice, other)
        if choice.token_ids != other.token_ids:
            rivals = [each for each in expected if each.token_ids == choice.token_ids]
            assert rivals and abs(rivals[0].score - other.score) < tolerance, (choice, other)
