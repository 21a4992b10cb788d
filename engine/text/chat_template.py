"""Renders messages with the model's own chat template, in a sandbox, with bounded output.

Only templates that came with the model are rendered; a caller supplies messages, never code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequest, ModelLoadError

MAX_RENDERED_CHARACTERS = 64 << 20


class ChatTemplate:
    """A compiled template and the special tokens it may write."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: role -> text, such as {"bos_token": "<s>"}. Raises ModelLoadError for a broken template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the model's chat template is broken: line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`, ready for `encode(..., add_special_tokens=False)`.

        `now` is the time that a template may print (UTC now by default): pass the job's own, so that a later attempt
        renders the same text. `variables` are extra names for templates that have switches (`enable_thinking`).
        Raises InvalidRequest where the template refuses the messages (an unknown role, a wrong order).
        """
        moment = now or datetime.now(UTC)
        names: dict[str, Any] = {
            **(variables or {}),
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "strftime_now": lambda pattern: moment.strftime(pattern),
        }
        pieces: list[str] = []
        num_characters = 0
        try:
            for piece in self._template.generate(names):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > MAX_RENDERED_CHARACTERS:
                    raise InvalidRequest("messages", f"render to more than {MAX_RENDERED_CHARACTERS} characters")
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error
        return "".join(pieces)


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks assistant text for training; here it is just its contents."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own form)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
