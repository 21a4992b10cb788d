"""What a caller may ask of sampling: vLLM's names and meanings, validated before anything is queued.

Plain data without torch, so that whoever admits requests can check them with the engine's own rules.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOPS = 64  # stop strings, stop token ids and bad words, each
MAX_STOP_BYTES = 1024  # of one stop string or bad word, in UTF-8
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_GUIDED_BYTES = 65_536  # of a schema, regex, grammar, or all choices together
MAX_GUIDED_CHOICES = 1024
GREEDY_BELOW = 1e-5  # a positive temperature below this is greedy, as in vLLM: logit / T would overflow
_INT32_MAX = 2**31 - 1


class Guided(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A shape that the output must have; exactly one of the fields is set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drawn and when they end. Call `validated` before use; it also fills in what is implied.

    A temperature of 0 (or below 1e-5) is greedy. `top_k` 0 or -1 keeps all tokens, and so does one over the vocabulary.
    `max_tokens` None runs to the end of the context. Logprobs are of the raw model distribution.
    """

    n: int = 1  # choices, 1..128
    best_of: int | None = None  # n..128 candidates are drawn, and the n with the best mean logprob are the choices
    temperature: float = 1.0  # 0..100
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0
    min_p: float = 0.0  # 0..1
    seed: int | None = None  # None: a random one is drawn and recorded; used modulo 2**64
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0  # no end of sequence, stop token or stop string counts before so many tokens
    ignore_eos: bool = False
    logprobs: int | None = None  # most likely tokens reported beside the chosen one, 0..20
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0  # -2..2
    frequency_penalty: float = 0.0  # -2..2
    repetition_penalty: float = 1.0  # 0.01..100
    logit_bias: dict[int, float] | None = None  # token id -> -100..100
    bad_words: list[str] | None = None
    use_beam_search: bool = False  # of width n, or best_of where given; the n best hypotheses are the choices
    length_penalty: float = 1.0  # of beams: hypotheses rank by sum of logprobs / tokens ** length_penalty
    early_stopping: bool | Literal["never"] = False  # of beams: see `engine.beams`
    guided: Guided | None = None
    priority: int = 0  # lower goes first, under the policy `priority`
    deadline: float | None = None  # Unix time in seconds, under the policy `deadline`

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def num_sequences(self) -> int:
        """Sequences that grow in the engine: one for each choice, or for each candidate that may become one."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_held_back(self) -> bool:
        """Whether the choices are known only when all sequences have ended: nothing is told before."""
        return self.use_beam_search or self.num_sequences > self.n

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Builds parameters from plain data (JSON or MessagePack); wrong types and unknown fields raise InvalidRequest.

        The values themselves are checked by `validated`.
        """
        try:
            return msgspec.convert(dict(mapping), cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise _type_error(str(error)) from None

    def validated(
        self,
        *,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        num_prompt_tokens: int | None = None,
    ) -> SamplingParams:
        """Checks every field and returns the parameters in normal form.

        Raises InvalidRequest naming the field, what is wrong with it, and the remedy. What depends on the model or the
        prompt is checked as far as it is given. Normal form: greedy is temperature 0, an unfiltering `top_k` is 0, and
        `max_tokens` ends at the context where context and prompt are known.
        """
        params = SamplingParams.from_mapping(msgspec.structs.asdict(self))
        _check_numbers(params)
        _check_stops(params, vocab_size)
        _check_tokens(params, vocab_size)
        _check_candidates(params)
        _check_guided(params)
        limit = params.max_tokens
        if max_model_len is not None and num_prompt_tokens is not None:
            room = max_model_len - num_prompt_tokens
            if room < 1:
                raise InvalidRequest(
                    "prompt",
                    f"has {num_prompt_tokens} tokens and the context holds {max_model_len}; "
                    f"shorten it to {max_model_len - 1} tokens or fewer, so that one can be generated",
                )
            limit = room if limit is None else min(limit, room)
        top_k = params.top_k
        if top_k < 0 or top_k > _INT32_MAX or (vocab_size is not None and top_k >= vocab_size):
            top_k = 0
        return msgspec.structs.replace(
            params,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=top_k,
            max_tokens=limit,
            min_tokens=params.min_tokens if limit is None else min(params.min_tokens, limit),
        )


def _type_error(text: str) -> InvalidRequest:
    """msgspec says "Expected `float`, got `str` - at `$.temperature`", or names the unknown field instead."""
    unknown = re.search(r"unknown field `([^`]*)`", text)
    if unknown:
        return InvalidRequest(unknown[1], "is not a sampling parameter; remove it or correct its name")
    path = re.search(r" - at `(?:key in )?\$\.?([^`]*)`", text)
    what = text.split(" - at ")[0]
    return InvalidRequest((path and path[1]) or "params", f"{what[0].lower()}{what[1:]}; send a value of that type")


# field -> (least, greatest)
_FLOAT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "length_penalty": (-100.0, 100.0),
}
_INT_RANGES: dict[str, tuple[int, int]] = {
    "n": (1, MAX_CHOICES),
    "top_k": (-1, 2**63 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, _INT32_MAX),
    "min_tokens": (0, _INT32_MAX),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "priority": (-_INT32_MAX, _INT32_MAX),
}
_RANGES = [(name, least, greatest) for name, (least, greatest) in (_FLOAT_RANGES | _INT_RANGES).items()]


def _check_numbers(params: SamplingParams) -> None:
    for name, least, greatest in _RANGES:
        value = getattr(params, name)
        if value is not None and not least <= value <= greatest:  # also true of NaN
            raise InvalidRequest(name, f"is {value}; give a number from {least} to {greatest}")
    if params.top_p == 0.0:
        raise InvalidRequest("top_p", "is 0, which keeps no token; give a number above 0, or use temperature 0")
    if params.deadline is not None and not (math.isfinite(params.deadline) and params.deadline > 0):
        raise InvalidRequest("deadline", f"is {params.deadline}; give a Unix time in seconds")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidRequest("min_tokens", f"is {params.min_tokens}, over max_tokens {params.max_tokens}; lower it")
    if params.best_of is not None and not params.n <= params.best_of <= MAX_CHOICES:
        raise InvalidRequest("best_of", f"is {params.best_of}; give a number from n ({params.n}) to {MAX_CHOICES}")


def _check_stops(params: SamplingParams, vocab_size: int | None) -> None:
    for name, strings in (("stop", params.stop), ("bad_words", params.bad_words or [])):
        if len(strings) > MAX_STOPS:
            raise InvalidRequest(name, f"has {len(strings)} strings; send at most {MAX_STOPS}")
        for index, string in enumerate(strings):
            if not string:
                raise InvalidRequest(name, f"string {index} is empty; remove it")
            if len(string) > MAX_STOP_BYTES or len(string.encode(errors="replace")) > MAX_STOP_BYTES:
                raise InvalidRequest(name, f"string {index} is over {MAX_STOP_BYTES} bytes of UTF-8; shorten it")
            if any("\ud800" <= character <= "\udfff" for character in string):
                raise InvalidRequest(name, f"string {index} holds half of a surrogate pair; send valid Unicode")
    if len(params.stop_token_ids) > MAX_STOPS:
        raise InvalidRequest("stop_token_ids", f"has {len(params.stop_token_ids)} ids; send at most {MAX_STOPS}")
    for token_id in params.stop_token_ids:
        _check_token("stop_token_ids", token_id, vocab_size)


def _check_tokens(params: SamplingParams, vocab_size: int | None) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if vocab_size is not None and count is not None and count > vocab_size:
            raise InvalidRequest(name, f"is {count} and the vocabulary has {vocab_size} tokens; ask for fewer")
    biases = params.logit_bias or {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest("logit_bias", f"has {len(biases)} entries; send at most {MAX_LOGIT_BIASES}")
    for token_id, bias in biases.items():
        _check_token("logit_bias", token_id, vocab_size)
        if not -100.0 <= bias <= 100.0:
            raise InvalidRequest("logit_bias", f"of token {token_id} is {bias}; give a number from -100 to 100")


def _check_token(name: str, token_id: int, vocab_size: int | None) -> None:
    if token_id < 0 or token_id >= (_INT32_MAX if vocab_size is None else vocab_size):
        known = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size} tokens"
        raise InvalidRequest(name, f"names token {token_id}, which is outside {known}; remove it")


_NEUTRAL = SamplingParams()


def _check_candidates(params: SamplingParams) -> None:
    """Beams are ranked, not drawn: what shapes a draw is refused beside them, and what shapes them without them."""
    if not params.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(params, name) != getattr(_NEUTRAL, name):
                raise InvalidRequest(name, "concerns beams alone; leave it out, or set use_beam_search")
        if params.num_sequences > params.n and params.is_greedy:
            raise InvalidRequest("best_of", "greedy candidates are all the same; leave it out, or raise temperature")
        return
    for name in ("temperature", "top_p", "min_p"):
        if getattr(params, name) != getattr(_NEUTRAL, name):
            raise InvalidRequest(name, "shapes draws, and beam search draws nothing; leave it out")
    if params.top_k > 0:
        raise InvalidRequest("top_k", "shapes draws, and beam search draws nothing; leave it out")
    if params.guided is not None:
        raise InvalidRequest("guided", "cannot shape beams; leave it out, or leave use_beam_search out")


def _check_guided(params: SamplingParams) -> None:
    """What needs no compiler: that is `engine.guided.grammar.check`."""
    if params.guided is None:
        return
    given = {name: value for name, value in msgspec.structs.asdict(params.guided).items() if value is not None}
    if len(given) != 1:
        named = ", ".join(given) or "nothing"
        raise InvalidRequest("guided", f"sets {named}; set exactly one of json, regex, choice and grammar")
    (name, value), *_ = given.items()
    if name == "choice":
        if not 1 <= len(value) <= MAX_GUIDED_CHOICES or not all(value):
            raise InvalidRequest(
                "guided", f"choice: has {len(value)} strings; send 1 to {MAX_GUIDED_CHOICES}, none of them empty"
            )
    elif not value and value != {}:
        raise InvalidRequest("guided", f"{name}: is empty; send one, or leave guided out")
    try:
        num_bytes = len(msgspec.json.encode(value))
    except UnicodeEncodeError:
        raise InvalidRequest("guided", f"{name}: holds half of a surrogate pair; send valid Unicode") from None
    if num_bytes > MAX_GUIDED_BYTES:
        raise InvalidRequest("guided", f"{name}: has {num_bytes} bytes as JSON; shorten it to {MAX_GUIDED_BYTES}")
    if params.ignore_eos:
        raise InvalidRequest("ignore_eos", "is set, and a guided output ends where its grammar does; leave one out")
