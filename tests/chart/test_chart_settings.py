"""Every setting can be set, none is invented, and each process reads what the chart says."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest
from cyclopts import App

from infra.settings import (
    DispatcherSettings,
    GatewaySettings,
    PipelineSettings,
    QueueSettings,
    StoreSettings,
    WorkerSettings,
)
from millstream.flags import takes_settings
from tests.chart.chart_render import CHART, Helm, Values, all_values, container, environment, load_values, pods

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
QUEUE = SCHEMA["properties"]["queue"]["properties"]["settings"]
WORKER = SCHEMA["definitions"]["worker"]["properties"]

# Where the chart lets an operator set what a process reads.
OFFERED: dict[str, list[dict[str, Any]]] = {
    "gateway": [SCHEMA["properties"]["gateway"]["properties"]["settings"], QUEUE],
    "dispatcher": [SCHEMA["properties"]["dispatcher"]["properties"]["settings"], QUEUE],
    "pipelines": [SCHEMA["properties"]["pipelines"]["properties"]["settings"], QUEUE],
    "worker": [WORKER["settings"], WORKER["engine"], QUEUE],
}
# What has a value of its own in the chart, or comes from a Secret.
SET_BY_THE_CHART = {
    "gateway": {"host", "port", "shutdown_seconds", "api_keys", "admin_keys", "cache_secret"},
    "dispatcher": {"webhook_secret", "celery_url", "dispatcher_health_port"},
    "pipelines": {"celery_url", "file_roots", "pipelines_health_port"},
    "worker": {"model", "alias", "drain_seconds", "metrics_port", "max_workers"},
}
STORE = {"redis_url", "blob_url", "cache_dir", "durability", "durability_replicas"}
NOT_FOR_OPERATORS = "fake_"  # engine options of the deterministic stand-in
JSON_TYPE = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _read_by(process: str) -> dict[str, Any]:
    """Name -> type of every setting that `millstream PROCESS` reads: the parameters of the command itself."""
    command = getattr(importlib.import_module(f"millstream.commands.{process}"), process)
    hints = {name: get_args(one.annotation)[0] for name, one in inspect.signature(command).parameters.items()}
    return {name: hint for name, hint in hints.items() if name != "config"}


def _said(schema: dict[str, Any]) -> Any:
    """What a schema allows, as `_expected` writes it."""
    return sorted(schema["enum"]) if "enum" in schema and "type" not in schema else schema["type"]


def _expected(hint: Any) -> Any:
    """A setting's type in the schema's words; the choices of a literal."""
    if get_origin(hint) is Literal:
        return sorted(get_args(hint))
    [kind] = [one for one in get_args(hint) or [hint] if one is not NoneType]
    return _expected(kind) if get_origin(kind) is Literal else JSON_TYPE[kind]


@pytest.mark.parametrize("process", OFFERED)
def test_the_schema_offers_what_a_process_reads(process: str) -> None:
    """A setting that is new belongs into values.schema.json, or above if the chart sets it itself."""
    own = SET_BY_THE_CHART[process] | STORE
    expected = {
        name: _expected(hint)
        for name, hint in _read_by(process).items()
        if name not in own and not name.startswith(NOT_FOR_OPERATORS)
    }
    offered = {name: _said(one) for schema in OFFERED[process] for name, one in schema["properties"].items()}
    assert offered == expected


@pytest.mark.parametrize("name", all_values())
def test_no_setting_is_invented(helm: Helm, name: str) -> None:
    for owner, pod in pods(helm.template(load_values(name))):
        for box in pod["containers"]:
            known = {f"MILLSTREAM_{one.upper()}" for one in _read_by(box["name"])} if box["name"] in OFFERED else set()
            used = {variable for variable in environment(box) if variable.startswith("MILLSTREAM_")}
            assert used <= known, f"{owner}: {used - known}"
            assert not known or {f"MILLSTREAM_{one.upper()}" for one in STORE} <= used


def _as_read(box: dict[str, Any], kinds: list[type], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings as the command line reads them out of a container's environment; a Secret's value is its key."""
    for variable, value in environment(box).items():
        if variable.startswith("MILLSTREAM_"):
            monkeypatch.setenv(variable, value if isinstance(value, str) else value["secretKeyRef"]["key"])
    read: dict[str, Any] = {}
    app = App(name="read", result_action="return_value", exit_on_error=False)
    app.default(takes_settings(_noting(kinds, read)))
    assert app([]) == 0
    return read


def _noting(kinds: list[type], read: dict[str, Any]) -> Callable[..., int]:
    """A command that takes settings of those kinds and notes their fields in `read`."""

    def command(**given: Any) -> int:
        read.update({name: value for one in given.values() for name, value in vars(one).items()})
        return 0

    taken = {f"settings_{number}": kind for number, kind in enumerate(kinds)}
    parameters = [
        inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for one, kind in taken.items()
    ]
    command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    command.__annotations__ = {**taken, "return": int}
    return command


READ: list[tuple[str, type, Values]] = [
    (
        "-gateway",
        GatewaySettings,
        {
            "host": "0.0.0.0",
            "port": 8080,
            "shutdown_seconds": 20.0,
            "max_body_bytes": 8388608,
            "keepalive_seconds": 7.5,
            "api_keys": "api-keys",
            "cache_secret": "cache-secret",
            "admin_keys": "admin-keys",
        },
    ),
    (
        "-dispatcher",
        DispatcherSettings,
        {
            "webhook_secret": "webhook-secret",
            "webhook_timeout_seconds": 20.5,
            "webhook_allow": "10.0.0.0/8",
            "celery_url": "url",
            "dispatcher_health_port": 8081,
        },
    ),
    (
        "-pipelines",
        PipelineSettings,
        {
            "celery_url": "url",
            "file_roots": "/inputs/books:/inputs/mail",
            "s3_roots": "s3://inputs/books,s3://inputs/mail",
            "run_window": 64,
            "pipelines_health_port": 8081,
        },
    ),
    (
        "-worker-large",
        WorkerSettings,
        {
            "model": "s3://models/llama-3.3-70b",
            "alias": "llama-3.3-70b",
            "drain_seconds": 120.0,
            "metrics_port": 9100,
            "max_workers": 2,
        },
    ),
    ("-worker-small", WorkerSettings, {"alias": "smollm2-1.7b", "lease_seconds": 60.0, "drain_seconds": 30.0}),
]


@pytest.mark.parametrize(("process", "kind", "expected"), READ, ids=[one[0] for one in READ])
def test_each_process_reads_what_the_chart_says(
    newest_helm: Helm, monkeypatch: pytest.MonkeyPatch, process: str, kind: type, expected: Values
) -> None:
    box = container(newest_helm.template(load_values("production")), process)
    read = _as_read(box, [StoreSettings, QueueSettings, kind], monkeypatch)
    assert read["idempotency_seconds"] == 172800.0  # the same in every process
    assert {name: read[name] for name in expected} == expected
    assert (read["redis_url"], read["blob_url"]) == ("url", "s3://payloads/millstream")
    assert read["cache_dir"] == Path("/var/cache/millstream")


def test_the_engine_reads_what_a_pool_says(newest_helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.config import EngineConfig

    box = container(newest_helm.template(load_values("production")), "-worker-small")
    read = _as_read(box, [EngineConfig], monkeypatch)
    assert (read["max_model_len"], read["gpu_memory_utilization"], read["enable_prefix_caching"]) == (8192, 0.9, True)


def test_what_pipelines_may_read_is_mounted_and_read_only(newest_helm: Helm) -> None:
    box = container(newest_helm.template(load_values("production")), "-pipelines")
    roots = environment(box)["MILLSTREAM_FILE_ROOTS"].split(":")
    mounts = {mount["mountPath"]: mount for mount in box["volumeMounts"]}
    assert all(mounts[root]["readOnly"] for root in roots)
    assert "MILLSTREAM_FILE_ROOTS" not in environment(container(newest_helm.template(), "-pipelines"))
