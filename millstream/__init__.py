"""Millstream's public face: the command line, the Python client, and all processes as one tree.

Importing this package imports none of them; each comes with its first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.client.client import Client
    from millstream.client.errors import ClientError
    from millstream.stack.stack import Stack

__all__ = ["Client", "ClientError", "Stack"]

_HOMES = {
    "Client": "millstream.client.client",
    "ClientError": "millstream.client.errors",
    "Stack": "millstream.stack.stack",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'millstream' has no attribute {name!r}")
