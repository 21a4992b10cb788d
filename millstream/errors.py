"""What the command line says instead of a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot do what it was asked; the message says why and what to do."""

    exit_code = 1


class UsageError(CommandError):
    """The command was called with something that it cannot use."""

    exit_code = 2
