"""From the settings' dataclasses to flags, environment variables and TOML keys.

A field `lease_seconds` is `--lease-seconds`, `MILLSTREAM_LEASE_SECONDS` and `lease_seconds = 30` in a TOML file; the
flag wins over the variable, the variable over the file, the file over the default. Nothing else names a setting.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from cyclopts import App, Group, Parameter

from millstream.comments import field_comments
from millstream.errors import UsageError
from millstream.tether import VARIABLE as TETHER_VARIABLE

Command = TypeVar("Command", bound=Callable[..., int])
Settings = TypeVar("Settings")

# Names that other tools have given to some settings; our own name of the variable wins over them.
CONVENTIONAL: Mapping[str, str] = {
    "redis_url": "REDIS_URL",
    "model": "MODEL_NAME",
    "max_model_len": "MAX_MODEL_LEN",
    "gpu_memory_utilization": "GPU_MEMORY_UTILIZATION",
    "max_num_seqs": "MAX_NUM_SEQS",
}

CONFIG_VARIABLE = "MILLSTREAM_CONFIG"
PREFIX = "MILLSTREAM_"
# Variables that are no settings: of the client's commands, and of `up` for its children.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, TETHER_VARIABLE, "MILLSTREAM_URL", "MILLSTREAM_API_KEY"})

ConfigFile = Annotated[
    Path | None,
    Parameter(name="--config", env_var=CONFIG_VARIABLE, help="a TOML file with settings; flags and variables win"),
]


def variables_of(name: str) -> list[str]:
    """The environment variables of the setting `name`, the stronger first."""
    own = f"MILLSTREAM_{name.upper()}"
    return [own, CONVENTIONAL[name]] if name in CONVENTIONAL else [own]


def settings_kinds() -> dict[str, type]:
    """Every settings dataclass there is, by the name that its flags are grouped under."""
    from engine.config import EngineConfig
    from infra import settings
    from millstream.stack.settings import UpSettings

    return {
        "Up": UpSettings,
        "Store": settings.StoreSettings,
        "Queue": settings.QueueSettings,
        "Gateway": settings.GatewaySettings,
        "Worker": settings.WorkerSettings,
        "Engine": EngineConfig,
        "Dispatcher": settings.DispatcherSettings,
        "Pipelines": settings.PipelineSettings,
    }


def setting_names() -> set[str]:
    return {name for kind in settings_kinds().values() for name in _names(kind)}


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """Raises UsageError for a variable that looks like ours and is none: misspelt, a setting would do nothing."""
    known = {f"{PREFIX}{name.upper()}" for name in setting_names()} | OTHER_VARIABLES
    for name in sorted(environment.keys() - known):
        if name.startswith(PREFIX):
            near = get_close_matches(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else "unset it, or see --help for those there are"
            raise UsageError(f"the environment variable {name} is no setting; {hint}")


def _names(kind: Any) -> set[str]:
    return {one.name for one in fields(kind)}


def takes_settings(command: Command) -> Command:
    """Lets `command` be called with flags: each parameter that is a settings dataclass becomes one flag a field.

    A name that two kinds of settings share is one flag that feeds both. A `--config` flag is added, too. Parameters of
    other types stay as they are.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {kind: Group(title, sort_key=number) for number, (title, kind) in enumerate(settings_kinds().items())}
    parameters: list[inspect.Parameter] = []
    expanded: dict[str, type] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            expanded[parameter.name] = kind
            there = {one.name for one in parameters}
            parameters += [flag for flag in _flags(kind, groups[kind]) if flag.name not in there]
        else:
            parameters.append(parameter.replace(annotation=kind))
    parameters.append(inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile))
    signature = inspect.Signature(sorted(parameters, key=lambda one: one.kind), return_annotation=hints["return"])

    def called_with_flags(*positional: Any, **given: Any) -> int:
        refuse_unknown_variables(os.environ)
        bound = signature.bind(*positional, **given)
        bound.apply_defaults()
        values = bound.arguments
        del values["config"]  # read by the source of TOML values already
        flags = {flag: values.pop(flag) for kind in expanded.values() for flag in _names(kind) & values.keys()}
        for name, kind in expanded.items():
            values[name] = _build(kind, {flag: flags[flag] for flag in _names(kind)})
        ordered = inspect.signature(command).parameters.values()
        before = [values.pop(one.name) for one in ordered if one.kind is one.POSITIONAL_OR_KEYWORD]
        rest = [value for one in ordered if one.kind is one.VAR_POSITIONAL for value in values.pop(one.name)]
        return command(*before, *rest, **values)

    called_with_flags.__signature__ = signature  # type: ignore[attr-defined]
    called_with_flags.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    called_with_flags.__name__ = command.__name__
    called_with_flags.__doc__ = command.__doc__
    return called_with_flags  # type: ignore[return-value]


def from_environment(kind: type[Settings]) -> Settings:
    """Settings as the environment and the file that it names give them, without any flag."""
    from millstream.toml_file import apply_toml

    seen: list[Settings] = []

    def command(settings: Settings) -> int:
        seen.append(settings)
        return 0

    command.__annotations__["settings"] = kind
    app = App(config=[apply_toml], result_action="return_value", exit_on_error=False, print_error=False)
    app.default(takes_settings(command))
    app([])
    return seen[0]


def _flags(kind: type, group: Group) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    comments = field_comments(kind)
    return [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(one),
            annotation=Annotated[
                hints[one.name],
                Parameter(env_var=variables_of(one.name), help=comments.get(one.name, ""), group=group),
            ],
        )
        for one in fields(kind)
    ]


def _default(one: Field[Any]) -> Any:
    if one.default is not MISSING:
        return one.default
    if one.default_factory is not MISSING:
        return one.default_factory()
    return inspect.Parameter.empty


def _build(kind: type, values: dict[str, Any]) -> Any:
    from engine.errors import EngineError

    try:
        return kind(**values)
    except (EngineError, ValueError) as error:
        raise UsageError(str(error)) from error
