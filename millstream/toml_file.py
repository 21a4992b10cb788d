"""Settings from a TOML file: `name = value` lines, one file for all processes."""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cyclopts import App
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict

from millstream.errors import UsageError
from millstream.flags import setting_names


def apply_toml(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Gives flags that neither the command line nor the environment set the values of the file named by `--config`.

    Settings of other commands are passed over, so that all processes can share one file.
    """
    try:
        argument, _, _ = arguments.match("--config")
    except ValueError:  # a command without settings
        return
    if not argument.tokens:
        return
    path = Path(argument.tokens[-1].value).expanduser()
    Dict(read_settings(path), source=str(path), allow_unknown=True, use_commands_as_keys=False)(
        app, commands, arguments
    )


def read_settings(path: Path) -> dict[str, Any]:
    """The file's settings. Raises UsageError naming the file, the line or key, and the remedy."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path}: not valid TOML: {error}") from error
    known = setting_names()
    for name, value in values.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"--config {path}: there is no setting {name!r}{hint}")
        if isinstance(value, dict):
            raise UsageError(f"--config {path}: {name!r} is a table; a setting is one `{name} = value` line")
    return values
