"""An engine on trial over the tiny model: requests in any company, each compared with itself alone in a cold engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import LLM, EngineConfig, SamplingParams
from engine.collector import Collector
from engine.config import LoadedModel
from engine.kv_storage import block_bytes
from engine.models.draft import load_draft_model
from engine.outputs import RequestDelta, RequestOutput
from engine.runner import GIB, TorchRunner, speculate
from tests.engine import invariants

BLOCK = 8
VOCABULARY = 320
CONTEXT = 512


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids without special ones."""
    return random.Random(f"{seed}/{length}").choices(range(3, 270), k=length)


class Trial:
    """One engine with the weights of `loaded`, a pool and a cache of its own; every step is followed by a check."""

    def __init__(self, loaded: LoadedModel, *, folder: Path | None = None, **changes: Any) -> None:
        """`folder`: of the model, where something beside it must be loaded, as a drafter is."""
        settings = {"block_size": BLOCK, "num_kv_blocks": 128, "max_num_seqs": 16, "speculative": "none", **changes}
        num_host_slots = settings.pop("num_host_slots", 0)
        assert isinstance(loaded.runner, TorchRunner)
        decoder = loaded.runner.decoder
        dtype = loaded.runner._kv.layer(0)[0].dtype
        per_block = block_bytes(decoder.config, settings["block_size"], dtype)
        config = EngineConfig(swap_space=num_host_slots * per_block / GIB, **settings)
        runner = TorchRunner(
            decoder,
            config.max_model_len or loaded.runner.max_model_len,
            config.block_size,
            num_kv_blocks=settings["num_kv_blocks"],
            num_host_slots=num_host_slots,
            dtype=dtype,
        )
        self.loaded = loaded
        draft = load_draft_model(folder or Path(), decoder, config)
        speculate(runner, config, draft)
        info = replace(
            loaded.info, max_model_len=runner.max_model_len, max_draft_len=None if draft is None else draft.max_len
        )
        self.llm = LLM(LoadedModel(runner=runner, tokenizer=loaded.tokenizer, info=info), config)
        self.collectors: dict[str, Collector] = {}
        self.deltas: dict[str, list[RequestDelta]] = {}
        self.asked: dict[str, tuple[list[int], dict[str, Any]]] = {}
        self.finished: list[str] = []

    def add(self, request_id: str, prompt: list[int] | str, **params: Any) -> None:
        own = {name: params.pop(name) for name in ("salt", "tenant", "adapter", "emitted") if name in params}
        params = {"seed": 1, "ignore_eos": True, **params}
        self.llm.add_request(request_id, prompt, SamplingParams(**params), **own)
        token_ids = self.loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self.asked[request_id] = (token_ids, params)
        self.collectors[request_id] = Collector(request_id, token_ids, params.get("n", 1))
        self.deltas[request_id] = []

    def step(self) -> list[RequestDelta]:
        told = self.llm.step()
        self.llm.check_integrity()
        self.take(told)
        return told

    def take(self, told: list[RequestDelta]) -> None:
        for delta in told:
            self.deltas[delta.request_id].append(delta)
            self.collectors[delta.request_id].add(delta)
            if delta.finished:
                self.finished.append(delta.request_id)

    def abort(self, request_id: str) -> None:
        delta = self.llm.abort(request_id)
        if delta is not None:
            self.take([delta])
            del self.asked[request_id]

    def run(self, *, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.llm.has_unfinished():
                invariants.nothing_is_held(self.llm._scheduler)
                return
            self.step()
        raise AssertionError(f"{self.llm.stats().num_requests} requests are unfinished after {max_steps} steps")

    def output(self, request_id: str) -> RequestOutput:
        return self.collectors[request_id].output()

    def ask(self, prompt: list[int] | str, **params: Any) -> RequestOutput:
        """Adds a request and runs all there are."""
        request_id = f"ask{len(self.deltas)}"
        self.add(request_id, prompt, **params)
        self.run()
        return self.output(request_id)

    def assert_all_as_alone(self) -> None:
        """Every request that was not aborted, to the last bit of its logprobs; nothing is forgiven."""
        for request_id in self.asked:
            self.assert_as_alone(request_id)

    def assert_as_alone(self, request_id: str) -> None:
        prompt, params = self.asked[request_id]
        invariants.each_thing_told_once(self.deltas[request_id])
        invariants.outputs_equal_alone(self.output(request_id), alone(self.loaded, prompt, **params))


# By identity, and each entry keeps its model alive: a freed model's id is soon another's, whose tokens differ.
_alone: dict[tuple[int, str], tuple[LoadedModel, RequestOutput]] = {}


def alone(loaded: LoadedModel, prompt: list[int], **params: Any) -> RequestOutput:
    """The same request in an engine of its own: cold, without a cache, the whole prompt in one step."""
    key = (id(loaded), repr((prompt, sorted(params.items()))))
    if key not in _alone:
        trial = Trial(loaded, num_kv_blocks=512, max_num_batched_tokens=8192, max_num_seqs=128,
                      enable_prefix_caching=False)  # fmt: skip
        _alone[key] = (loaded, trial.ask(prompt, **params))
    return _alone[key][1]
