"""`/docs`: the API as one plain page, made from the OpenAPI document. It loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from litestar import Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b}"
    "h2{margin:2.5rem 0 .3rem;font-size:1.05rem}code,h2{font-family:ui-monospace,monospace}"
    "table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;padding:.25rem .75rem .25rem 0;"
    "vertical-align:top}td:first-child{white-space:nowrap}summary{cursor:pointer}"
    "@media (prefers-color-scheme:dark){body{background:#151515;color:#ddd}td{border-color:#444}a{color:#8ab4f8}}"
)


class DocsPage(OpenAPIRenderPlugin):
    """Renders the routes, their fields, and the structs that these are made of."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return page(openapi_schema).encode()


def page(document: dict[str, Any]) -> str:
    """The document as HTML."""
    info = document["info"]
    routes = "".join(
        _route(path, method, operation)
        for path, methods in sorted(document["paths"].items())
        for method, operation in methods.items()
    )
    structs = "".join(_struct(name, schema) for name, schema in sorted(document["components"]["schemas"].items()))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style>'
        f"<h1>{escape(info['title'])}</h1><p>{escape(info.get('description', ''))} "
        f'The same for machines: <a href="/openapi.json">/openapi.json</a>.</p>{routes}<h1>Fields</h1>{structs}</html>'
    )


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    rows = [
        (f"{one['name']} ({one['in']})", one.get("description", ""), one["schema"])
        for one in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        rows.append(("body", "", body))
    return (
        f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation.get('description', ''))}</p>"
        f"<table>{''.join(_row(*row) for row in rows)}</table>"
    )


def _struct(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", []))
    rows = "".join(
        _row(field + ("" if field in required else " (optional)"), about.get("description", ""), about)
        for field, about in schema.get("properties", {}).items()
    )
    about = escape(schema.get("description", ""))
    return f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{about}</p><table>{rows}</table>'


def _row(name: str, about: str, schema: dict[str, Any]) -> str:
    return f"<tr><td><code>{escape(name)}</code></td><td>{_type(schema)}</td><td>{escape(about)}</td></tr>"


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if reference := schema.get("$ref"):
        name = escape(reference.rsplit("/", 1)[1])
        return f'<a href="#{name}">{name}</a>'
    if choices := schema.get("oneOf") or schema.get("anyOf"):
        return " or ".join(_type(choice) for choice in choices)
    if values := schema.get("enum"):
        return " | ".join(escape(str(value)) for value in values)
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind))
