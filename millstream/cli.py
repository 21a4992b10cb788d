"""The command line. Each command is a file in `millstream/commands`, imported when it is called."""

from __future__ import annotations

import os
import sys

from cyclopts import App, CycloptsError

from infra.errors import MillstreamError, StoreUnavailable
from millstream.errors import CommandError
from millstream.tether import tether
from millstream.toml_file import apply_toml

_COMMANDS = {
    "up": "Everything at once, with an embedded server: for a laptop, a demo, a test.",
    "gateway": "The HTTP gateway.",
    "worker": "A worker: claims jobs and runs them in the engine.",
    "dispatcher": "The dispatcher: relays the outbox, delivers webhooks, sweeps.",
    "pipelines": "The steps of runs (bulk summarization).",
    "submit": "Submits a job and, unless told otherwise, streams its text.",
    "jobs": "Lists jobs, or shows one.",
    "dead-letters": "Jobs whose workers died: lists them, or makes new jobs of them.",
    "lanes": "Lanes of the queue: lists them, adds one, closes, opens, pauses or resumes one.",
    "summarize": "Summarizes documents through the queue.",
    "plan": "How many sequences of a model fit a GPU.",
    "doctor": "Checks what Millstream needs on this machine, and says how to mend it.",
    "acl": "Prints the server's users, one for each process, with just the rights that it needs.",
    "webhook-secret": "Prints the secret that webhooks are signed with.",
}


def build_app() -> App:
    """The command tree. No command's module is imported yet."""
    app = App(
        name="millstream",
        help="Queue-driven LLM inference: exact tokens, no lost jobs, honest waiting.",
        version=_version,
        config=[apply_toml],
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        suppress_keyboard_interrupt=False,
    )
    for name, help_line in _COMMANDS.items():
        noun = name.replace("-", "_")
        app.command(f"millstream.commands.{noun}:{noun}", name=name, help=help_line)
    return app


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 1 for a failure, 2 for wrong usage."""
    tether(os.environ)
    try:
        code = build_app()(sys.argv[1:] if arguments is None else arguments)
    except CycloptsError as error:
        _complain(f"{error} (see: millstream --help)")
        return 2
    except CommandError as error:
        _complain(str(error))
        return error.exit_code
    except StoreUnavailable as error:
        _complain(f"{str(error).rstrip('.')}; start one with `millstream up`, or name it with --redis-url or REDIS_URL")
        return 1
    except MillstreamError as error:
        _complain(str(error))
        return 1
    except BrokenPipeError:  # whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:  # no file that the caller could do something about
            raise
        _complain(f"{error.filename}: {error.strerror}; name a place that can be read and written")
        return 1
    except KeyboardInterrupt:
        _complain("stopped")
        return 130
    return code or 0


def _version() -> str:
    from importlib.metadata import version

    return version("millstream")


def _complain(message: str) -> None:
    print("millstream: " + " ".join(message.split()), file=sys.stderr)
