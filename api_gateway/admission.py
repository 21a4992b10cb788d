"""Decides whether a request may become a job, before anything is written: the model, its context, every parameter."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from api_gateway import eta
from api_gateway.auth import Keyring
from api_gateway.cards import Cards
from api_gateway.errors import DeadlineInfeasible, NotSupported
from api_gateway.outlook import Outlook
from api_gateway.token_counter import TokenCounter
from engine.errors import InvalidRequest
from engine.params import Guided, SamplingParams
from infra.contracts import JobSpec, Kind, Message, ModelCard, Tier, Webhook
from infra.errors import BadRequest, ContextTooLong
from infra.work import Work

SEED_BITS = 53  # a JavaScript client reads such a number back as it was
BYTES_PER_TOKEN = 3  # a guess for planning memory, where no count was needed


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a route was asked for, in our words. Exactly one of `prompt`, `prompt_token_ids`, `messages` is set."""

    model: str
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[Message] | None = None
    tier: Tier = Tier.STANDARD
    priority: int = 0
    deadline_ms: int | None = None
    queue_ttl_ms: int | None = None
    attempt_timeout_ms: int | None = None
    webhook: Webhook | None = None
    metadata: dict[str, str] = {}
    cache_salt: str = ""
    default_max_tokens: int | None = None  # where params do not say; None: the service's own
    # How errors name the caller's fields.
    input_name: str = "input"
    param_prefix: str = ""
    param_names: Mapping[str, str] = msgspec.field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return Kind.GENERATE if self.messages is None else Kind.CHAT

    def name_of(self, param: str) -> str:
        """The caller's name of an engine parameter."""
        if param in ("prompt", "messages"):
            return self.input_name
        return self.param_names.get(param, self.param_prefix + param)


class PromptSize(msgspec.Struct, frozen=True):
    """How many tokens a prompt has: the most it can be, and the count where it was counted."""

    most: int
    exact: int | None = None

    @property
    def estimate(self) -> int:
        return self.exact if self.exact is not None else math.ceil(self.most / BYTES_PER_TOKEN)


class Draft(msgspec.Struct, frozen=True):
    """A request that may become a job."""

    ask: Ask
    spec: JobSpec
    cost_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    cards: Cards
    outlook: Outlook
    counter: TokenCounter
    keyring: Keyring
    default_max_tokens: int

    async def draft(self, ask: Ask, tenant: str) -> Draft:
        """Checks everything about a request. Raises an error that names the field, its value, and what to do."""
        card = await self.cards.get(ask.model)
        _check_input(ask, card)
        try:
            params = ask.params.validated(vocab_size=card.vocab_size)
            if params.guided is not None:
                await asyncio.to_thread(_check_grammar, params.guided)
            prompt = await self._prompt_size(ask, card, params)
        except InvalidRequest as error:
            name = ask.name_of(error.param)
            raise BadRequest(f"{name}: {error.message}", param=name) from None
        max_tokens = self._max_tokens(ask, card, params, prompt)
        await self._check_deadline(ask, params, Work(prompt.estimate, params.num_sequences * max_tokens))
        params = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
        )
        spec = JobSpec(
            model=ask.model,
            kind=ask.kind,
            params=msgspec.to_builtins(params),
            messages=ask.messages,
            prompt=ask.prompt,
            prompt_token_ids=ask.prompt_token_ids,
            metadata=ask.metadata,
            webhook=ask.webhook,
            salt=self.keyring.cache_domain(tenant, ask.cache_salt),
        )
        cost = min(prompt.estimate, card.max_model_len) + params.num_sequences * max_tokens
        return Draft(ask, spec, cost)

    async def _prompt_size(self, ask: Ask, card: ModelCard, params: SamplingParams) -> PromptSize:
        """Counts bytes, and tokens only where the bytes do not settle that the prompt fits.

        A tokenizer makes no more tokens of a text than it has bytes, but for the few that it sets around it.
        """
        if ask.prompt_token_ids is not None:
            return PromptSize(len(ask.prompt_token_ids), len(ask.prompt_token_ids))
        if ask.messages is not None:
            text = await self.counter.render(card, ask.messages)
        else:
            text = ask.prompt or ""
        most = len(text.encode()) + 2
        wanted = params.max_tokens or ask.default_max_tokens or self.default_max_tokens
        if most + wanted <= card.max_model_len:
            return PromptSize(most)
        count = await self.counter.count(card, text, add_special_tokens=ask.messages is None)
        return PromptSize(most, count)

    def _max_tokens(self, ask: Ask, card: ModelCard, params: SamplingParams, prompt: PromptSize) -> int:
        """How many tokens may be generated. Raises ContextTooLong where prompt and output do not fit together."""
        tokens = prompt.most if prompt.exact is None else prompt.exact
        room = card.max_model_len - tokens
        if room < 1:
            raise ContextTooLong(
                f"{ask.input_name}: the prompt has {tokens} tokens and {card.alias} holds {card.max_model_len}; "
                f"shorten it to {card.max_model_len - 1} tokens or fewer, or split it",
                param=ask.input_name,
            )
        if params.max_tokens is None:
            return min(room, ask.default_max_tokens or self.default_max_tokens)
        if params.max_tokens > room:
            name = ask.name_of("max_tokens")
            raise ContextTooLong(
                f"{name}: {params.max_tokens} tokens do not fit behind a prompt of {tokens}; {card.alias} holds "
                f"{card.max_model_len} in all: ask for {room} or fewer, or shorten the prompt",
                param=name,
            )
        return params.max_tokens

    async def _check_deadline(self, ask: Ask, params: SamplingParams, work: Work) -> None:
        """Refuses a deadline that would be missed even if all the workers there may be came at once."""
        if ask.deadline_ms is None:
            return
        facts, lane = await self.outlook.facts(ask.model), await self.cards.lane(ask.model)
        least_output = int(work.output_tokens) if params.ignore_eos else max(1, params.min_tokens)
        least_seconds = eta.least_finish_seconds(facts, lane, ask.tier, work, least_output_tokens=least_output)
        feasible_at = await self.outlook.store.now_ms() / 1000 + least_seconds  # the clock that will end the job
        if ask.deadline_ms <= feasible_at * 1000:
            earliest = datetime.fromtimestamp(math.ceil(feasible_at), UTC).isoformat()
            raise DeadlineInfeasible(
                f"deadline: no worker could meet it; the earliest that could be met is {earliest}", param="deadline"
            )


def _check_input(ask: Ask, card: ModelCard) -> None:
    name = ask.input_name
    if ask.messages is not None:
        if not ask.messages:
            raise BadRequest(f"{name}: the list is empty; send at least one message", param=name)
        if card.chat_template is None:
            raise NotSupported(f"model: {card.alias} has no chat template; send a plain prompt instead", param="model")
    elif ask.prompt_token_ids is not None:
        if not ask.prompt_token_ids:
            raise BadRequest(f"{name}: the list is empty; send at least one token id", param=name)
        bad = next(
            (end for end in (min(ask.prompt_token_ids), max(ask.prompt_token_ids)) if not _is_id(end, card)), None
        )
        if bad is not None:
            where = f"{name}[{ask.prompt_token_ids.index(bad)}]"
            raise BadRequest(
                f"{where}: {bad} is not a token id of {card.alias}; they go from 0 to {card.vocab_size - 1}",
                param=where,
            )
    elif not ask.prompt:
        raise BadRequest(f"{name}: the prompt is empty; send at least one character", param=name)


def _is_id(number: int, card: ModelCard) -> bool:
    return 0 <= number < card.vocab_size


def _check_grammar(guided: Guided) -> None:
    """In a thread: a large grammar takes a while, and so does the first one, which loads the library."""
    from engine.guided.grammar import check

    check(guided)
