"""Request bodies: JSON, decoded strictly, and errors that name the field, its value and what was expected."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from litestar.dto import AbstractDTO

from infra.errors import BadRequest

_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>.*)`$")
_FIELD = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>.*?)`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_SHOWN_CHARACTERS = 60


class StrictBody(AbstractDTO[Any]):
    """Decodes `data` as exactly its annotated type: "1" is no number, and unknown fields are refused by the structs."""

    @classmethod
    def create_for_field_definition(cls, field_definition: Any, handler_id: str, backend_cls: Any = None) -> None:
        pass  # decoders go by the type, not by the handler, whose id is costly to tell

    def decode_bytes(self, value: bytes) -> Any:
        return decode(value, decoder_of(self.asgi_connection.route_handler))

    @classmethod
    def create_openapi_schema(cls, field_definition: Any, handler_id: str, schema_creator: Any) -> Any:
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def is_supported_model_type_field(cls, field_definition: Any) -> bool:
        return False  # for answers: they are encoded as they are

    @classmethod
    def generate_field_definitions(cls, model_type: type[Any]) -> Iterator[Any]:  # type: ignore[override]
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: Any) -> bool:
        return False


def decoder_of(handler: Any) -> msgspec.json.Decoder[Any]:
    """Of a route handler's `data`."""
    return _decoder(handler.parsed_data_field.annotation)


@cache
def _decoder(expected: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(expected)


def decode(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[Any]) -> Any:
    """The body as the decoder's type. Raises BadRequest naming the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _misfit(bytes(body), str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(bytes(body), error) from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply; send the fields of this route, as /docs shows them") from None


def _misfit(body: bytes, message: str, expected: Any) -> BadRequest:
    """Valid JSON that is not what the route takes."""
    where = _WHERE.search(message)
    path = where["path"].split("[...]")[0] if where else ""  # within a mapping, msgspec does not say where
    what = message[: where.start()] if where else message
    if field := _FIELD.match(what):
        name = f"{path}.{field['name']}" if path else field["name"]
        if field["what"] == "missing required":
            return BadRequest(f"{name} is missing; every request to this route needs it", param=name)
        return BadRequest(f"{name} is not a field here{_suggestion(field['name'], expected, path)}", param=name)
    value = _shown(_value_at(body, path))
    if choices := choices_of(expected, path):
        return BadRequest(f"{path} is{value[1:] or ' something else'}; choose one of {', '.join(choices)}", param=path)
    return BadRequest(f"{path or 'the body'}: {what[0].lower()}{what[1:]}{value}", param=path or None)


def _suggestion(name: str, expected: Any, path: str) -> str:
    names = [field.encode_name for field in msgspec.structs.fields(expected)] if _is_struct(expected) else []
    close = difflib.get_close_matches(name, names, n=1) if not path else []
    return f"; did you mean {close[0]}?" if close else "; leave it out, or see /docs for the fields there are"


def choices_of(expected: Any, path: str = "") -> list[str]:
    """The values that a field of few values takes, null aside; empty for every other field."""
    kinds = [msgspec.inspect.type_info(expected)]
    for name, _ in _STEP.findall(path):
        inner: list[Any] = []
        for kind in kinds:
            match kind:
                case msgspec.inspect.StructType() if name:
                    inner += [field.type for field in kind.fields if field.encode_name == name]
                case msgspec.inspect.ListType() if not name:
                    inner.append(kind.item_type)
        kinds = [each for kind in inner for each in _members(kind)]
    few = [kind for one in kinds for kind in _members(one) if not isinstance(kind, msgspec.inspect.NoneType)]
    if not all(isinstance(kind, (msgspec.inspect.EnumType, msgspec.inspect.LiteralType)) for kind in few):
        return []
    return [
        str(value)
        for kind in few
        for value in (
            [member.value for member in kind.cls] if isinstance(kind, msgspec.inspect.EnumType) else kind.values
        )
    ]


def _members(kind: Any) -> tuple[Any, ...]:
    return kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)


def _is_struct(expected: Any) -> bool:
    return isinstance(expected, type) and issubclass(expected, msgspec.Struct)


def _value_at(body: bytes, path: str) -> Any:
    """What the body has at `path`; UNSET where the path does not say exactly where."""
    if not path:
        return msgspec.UNSET
    try:
        value: Any = msgspec.json.decode(body)
        for name, index in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, RecursionError, KeyError, IndexError, TypeError):
        return msgspec.UNSET
    return value


def _shown(value: Any) -> str:
    if value is msgspec.UNSET or isinstance(value, (dict, list)):
        return ""
    text = msgspec.json.encode(value).decode()
    return f": {text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '...'}"


class _NoNumber:
    """Stands for a NaN or an Infinity, which JSON does not have."""

    def __init__(self, literal: str) -> None:
        self.literal = literal


def _malformed(body: bytes, error: Exception) -> BadRequest:
    """No JSON at all. NaN and Infinity, which some clients write, are told by the name of their field."""
    try:
        loose = json.loads(body, parse_constant=_NoNumber)
        path, found = next(_no_numbers(loose, ""))
    except (ValueError, RecursionError, StopIteration):
        return BadRequest(f"the body is not valid JSON: {error}; send one JSON object in UTF-8")
    return BadRequest(
        f"{path or 'the body'}: {found.literal} is not a number that JSON knows; send a finite one", param=path or None
    )


def _no_numbers(value: Any, path: str) -> Iterator[tuple[str, _NoNumber]]:
    if isinstance(value, _NoNumber):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _no_numbers(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _no_numbers(inner, f"{path}[{index}]")
