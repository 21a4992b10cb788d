"""From settings back to environment variables: how `millstream up` tells its children what it was told.

Variables, not flags: a list of processes shows flags, and a Redis URL may hold a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from millstream.flags import CONFIG_VARIABLE, setting_names, variables_of


def environment_of(*settings: Any, base: Mapping[str, str]) -> dict[str, str]:
    """`base`, in which the settings speak instead of whatever it said about any setting.

    A setting that is None has no variable: the child takes the same default.
    """
    silenced = {CONFIG_VARIABLE, *(name for setting in setting_names() for name in variables_of(setting))}
    spoken = {name: value for name, value in base.items() if name not in silenced}
    for one in settings:
        for field in fields(one):
            value = getattr(one, field.name)
            if value is not None:
                spoken[variables_of(field.name)[0]] = _text(field.name, value)
    return spoken


def _text(name: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float() | Path():
            return str(value)
        case tuple() | list():
            return " ".join(_text(name, item) for item in value)
    raise TypeError(f"the setting {name} is a {type(value).__name__}, which no environment variable can hold")
