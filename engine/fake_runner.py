"""A stand-in for a model: deterministic tokens, no weights, no torch. For tests, demos and load tests.

It keeps what a model would keep: one number per token slot, the digest of the context up to that token, in blocks, and
reads the context back through the block tables. So a token depends on (context, seed, choice, output index) alone, and
a block that is shared, copied, swapped or cached wrongly changes the tokens, as it would with a model.

    digest[i] = mix(digest[i - 1], token[i])        token drawn after position i = f(digest[i], seed, choice, index)
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from engine.config import MODEL_PROPOSERS, EngineConfig, LoadedModel, ModelInfo
from engine.plan import Candidate, PositionLogprobs, Sampled, StepResult, TokenLogprob
from engine.text.tokenizer import Tokenizer
from engine.text.vocabulary import printable_bytes

if TYPE_CHECKING:
    from engine.plan import Plan, Row
    from engine.sequence import Sequence

MAX_MODEL_LEN = 8192
DEFAULT_NUM_BLOCKS = 4096
SLOTS_PER_GIB = 4096  # host slots that a GiB of swap space stands for

EOS, USER, ASSISTANT, SYSTEM = 256, 257, 258, 259
_SPECIAL_TOKENS = {EOS: "<|end|>", USER: "<|user|>", ASSISTANT: "<|assistant|>", SYSTEM: "<|system|>"}
VOCAB_SIZE = 256 + len(_SPECIAL_TOKENS)
_DRAWN = b"etaoin shrdlu cmfwyp vbgkqjxz. etaoin shrdlu, ETAOIN SHRDLU 0123"  # 64 bytes: 6 bits choose one

_LETTERS = sorted(set(_DRAWN))

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_MASK = 2**64 - 1


class FakeRunner:
    """`verify_kv` reads each row's whole context back and raises where a slot does not hold what it must.

    `sleep` spends the simulated cost of a step; a simulation's own clock may be moved instead.
    """

    def __init__(
        self, config: EngineConfig, *, verify_kv: bool = False, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.vocab_size = VOCAB_SIZE
        self.max_model_len = min(config.max_model_len or MAX_MODEL_LEN, MAX_MODEL_LEN)
        self.block_size = config.block_size
        self.num_kv_blocks = config.num_kv_blocks or DEFAULT_NUM_BLOCKS
        self.num_host_slots = int(config.swap_space * SLOTS_PER_GIB)
        self._config = config
        self._verify_kv = verify_kv
        self._sleep = sleep
        self._has_drafter = config.speculative in MODEL_PROPOSERS
        self._poison = config.fake_poison.encode() if config.fake_poison else None
        self._kv = [[0] * config.block_size for _ in range(self.num_kv_blocks)]
        self._host = [[0] * config.block_size for _ in range(self.num_host_slots)]

    def execute(self, plan: Plan) -> StepResult:
        for source, slot in plan.swap_out:
            self._host[slot] = self._kv[source].copy()
        for slot, target in plan.swap_in:
            self._kv[target] = self._host[slot].copy()
        for source, target in plan.copies:
            self._kv[target] = self._kv[source].copy()
        result = StepResult([])
        for index, row in enumerate(plan.rows):
            self._die_of_poison(row)
            if self._verify_kv:
                self._check_context(row)
            if self._has_drafter:
                self._draft(row)
            digests = self._write(row)
            result.samples += self._samples(row, digests)
            prompt_logprobs = self._prompt_logprobs(row, digests)
            if prompt_logprobs:
                result.prompt_logprobs[index] = prompt_logprobs
        seconds = self._config.fake_seconds_per_step + self._config.fake_seconds_per_token * plan.num_tokens
        if self._has_drafter and plan.rows:
            depth = max(row.num_proposals for row in plan.rows)
            result.draft_seconds = self._config.fake_seconds_per_draft * depth
        if plan.rows and seconds + result.draft_seconds:
            self._sleep(seconds + result.draft_seconds)
        return result

    def _samples(self, row: Row, digests: list[int]) -> list[Sampled]:
        if row.follows is not None:  # whose token the sequence itself does not have yet
            return [self._draw(row.sequence.ahead(row.token_ids), digests[-1])]
        if not row.num_proposals:
            return [self._draw(sequence, digests[-1]) for sequence in row.draws]
        return [self._draw(row.sequence.ahead(row.proposals[:place]), digest) for place, digest in enumerate(digests)]

    def _draft(self, row: Row) -> None:
        """Proposes what will be drawn, but for a share that goes one beside it."""
        digest = self._digest_before(row)
        for place in range(row.num_proposals):
            digest = mix(digest, row.token_ids[place])
            token_id = self._token(row.sequence.ahead(row.proposals[:place]), digest)
            is_right = mix(digest, 3) / 2**64 < self._config.fake_acceptance
            row.token_ids[place + 1] = EOS if token_id is None else token_id if is_right else token_id + 1

    def _write(self, row: Row) -> list[int]:
        """Computes the row's digests from the one before it in the pool, and writes them to its slots."""
        size, table = self.block_size, row.block_table
        digest = self._digest_before(row)
        digests = []
        for position, token_id in enumerate(row.token_ids, start=row.start):
            digest = mix(digest, token_id)
            self._kv[table[position // size]][position % size] = digest
            digests.append(digest)
        return digests

    def _digest_before(self, row: Row) -> int:
        previous = row.start - 1
        return self._kv[row.block_table[previous // self.block_size]][previous % self.block_size] if row.start else 0

    def _draw(self, sequence: Sequence, digest: int) -> Sampled:
        if sequence.request.beams is not None:
            return Sampled(None, candidates=self._candidates(sequence, digest))
        token_id = self._token(sequence, digest)
        if token_id is None:
            return Sampled(None, error="the output's grammar leaves no token")
        count = sequence.num_logprobs
        return Sampled(token_id, _logprobs(digest, token_id, count) if count is not None else None)

    def _candidates(self, sequence: Sequence, digest: int) -> list[Candidate]:
        """Every letter with a weight of its own, and the end of sequence where a draw would have been one."""
        count, beams = sequence.num_logprobs, sequence.request.beams
        assert beams is not None
        may_end = sequence.num_output_tokens >= sequence.params.min_tokens
        token_ids = [each for each in _LETTERS if may_end or each not in sequence.request.stop_token_ids]
        every = self._config.fake_eos_every
        if every and may_end and not sequence.params.ignore_eos and (mix(digest, 1) >> 16) % every == 0:
            token_ids.append(EOS)
        found = []
        for token_id in token_ids:
            logprob = math.log((mix(digest, token_id + 2) + 1) / 2**64) - 0.1
            logprobs = None if count is None else _logprobs(digest, token_id, count)
            found.append(Candidate(token_id, logprob, logprob, logprobs))
        return sorted(found, key=lambda each: (-each.weight, each.token_id))[: beams.num_candidates]

    def _token(self, sequence: Sequence, digest: int) -> int | None:
        params = sequence.params
        bits = mix(digest, 1)
        if not params.is_greedy:
            bits = mix(mix(mix(bits, sequence.seed), sequence.choice), sequence.num_output_tokens)
        every = self._config.fake_eos_every
        may_end = not params.ignore_eos and sequence.num_output_tokens >= params.min_tokens
        if every and may_end and (bits >> 16) % every == 0:
            return EOS
        if sequence.matcher is not None:
            allowed = sequence.matcher.allowed_after(sequence.output_token_ids).nonzero()[0]
            return int(allowed[bits % len(allowed)]) if len(allowed) else None
        return _DRAWN[bits >> 58]

    def _prompt_logprobs(self, row: Row, digests: list[int]) -> list[PositionLogprobs]:
        count = row.sequence.params.prompt_logprobs
        if count is None:
            return []
        prompt = row.sequence.prompt_token_ids
        positions = range(row.end - row.num_logits, min(row.end, len(prompt) - 1))
        return [_logprobs(digests[position - row.start], prompt[position + 1], count) for position in positions]

    def _check_context(self, row: Row) -> None:
        digest, size = 0, self.block_size
        for position, token_id in enumerate(row.sequence.tokens(0, row.start)):
            digest = mix(digest, token_id)
            block = row.block_table[position // size]
            if self._kv[block][position % size] != digest:
                raise RuntimeError(
                    f"{row.sequence.request.request_id}/{row.sequence.choice}: block {block} of position {position} "
                    "does not hold this context"
                )

    def _die_of_poison(self, row: Row) -> None:
        if self._poison is None or row.start >= row.sequence.num_prompt_tokens:
            return
        text = bytes(token_id for token_id in row.sequence.prompt_token_ids if token_id < 256)
        if self._poison in text:
            os.kill(os.getpid(), signal.SIGKILL)


def mix(digest: int, value: int) -> int:
    """64 bits that depend on every bit of both (the finalizer of SplitMix64)."""
    bits = (digest ^ (value + 0x9E3779B97F4A7C15)) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


def _logprobs(digest: int, token_id: int, count: int) -> PositionLogprobs:
    """Made up, but a function of the context and the token alone."""
    chosen = TokenLogprob(token_id, -1.0 - mix(digest, token_id) / 2**64, count + 1)
    top = [TokenLogprob((mix(digest, 7) + i) % VOCAB_SIZE, math.log(0.3) - i, i + 1) for i in range(count)]
    return PositionLogprobs(chosen, tuple(top))


def load_fake(
    config: EngineConfig, *, verify_kv: bool = False, sleep: Callable[[float], None] = time.sleep
) -> LoadedModel:
    """The model `fake`: a byte-level vocabulary, so any text works, and a chat template."""
    runner = FakeRunner(config, verify_kv=verify_kv, sleep=sleep)
    info = ModelInfo(
        name="fake",
        max_model_len=runner.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
        weights_digest="fake-1",
        tokenizer_digest="fake-bytes-1",
        dtype="none",
        kv_dtype="none",
        device="none",
        kernels="fake-1",
        chat_template=_CHAT_TEMPLATE,
    )
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return LoadedModel(runner=runner, tokenizer=Tokenizer(Path(folder)), info=info)


def write_tokenizer(folder: Path) -> None:
    """The tokenizer's files, in the form that every model folder has."""
    letters = {byte: letter for letter, byte in printable_bytes().items()}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocab = {letters[byte]: byte for byte in range(256)} | {text: i for i, text in _SPECIAL_TOKENS.items()}
    description = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in _SPECIAL_TOKENS.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config = {"eos_token": _SPECIAL_TOKENS[EOS], "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
