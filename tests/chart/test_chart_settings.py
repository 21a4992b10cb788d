"""Every setting can be set, none is invented, and each process reads what the chart says."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from chart_render import CHART, Helm, Values, all_values, container, environment, find, load_values, of_kind, pods

from infra import settings

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

# What each process reads: infra/settings.py. The worker reads engine/config.py, too.
KINDS: dict[str, list[type]] = {
    "gateway": [settings.StoreSettings, settings.QueueSettings, settings.GatewaySettings],
    "dispatcher": [settings.StoreSettings, settings.QueueSettings, settings.DispatcherSettings],
    "pipelines": [settings.StoreSettings, settings.QueueSettings, settings.PipelineSettings],
    "worker": [settings.StoreSettings, settings.QueueSettings, settings.WorkerSettings],
}

# Fields that have a value of their own in the chart, or come from a Secret.
SET_BY_THE_CHART = {
    settings.StoreSettings: {"redis_url", "blob_url", "cache_dir"},
    settings.QueueSettings: set(),
    settings.GatewaySettings: {"host", "port", "shutdown_seconds", "api_keys", "cache_secret"},
    settings.WorkerSettings: {"model", "alias", "drain_seconds", "metrics_port"},
    settings.DispatcherSettings: {"webhook_secret", "celery_url"},
    settings.PipelineSettings: {"celery_url", "file_roots"},
}
WHERE = {
    settings.QueueSettings: SCHEMA["properties"]["queue"],
    settings.GatewaySettings: SCHEMA["properties"]["gateway"]["properties"]["settings"],
    settings.WorkerSettings: SCHEMA["definitions"]["worker"]["properties"]["settings"],
    settings.DispatcherSettings: SCHEMA["properties"]["dispatcher"]["properties"]["settings"],
    settings.PipelineSettings: SCHEMA["properties"]["pipelines"]["properties"]["settings"],
}
JSON_TYPE = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _engine_kind() -> type:
    return pytest.importorskip("engine.config").EngineConfig  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", WHERE, ids=lambda kind: kind.__name__)
def test_the_schema_has_the_fields_of_the_settings(kind: type) -> None:
    """A field that is new in infra/settings.py belongs into values.schema.json (or above, if the chart sets it)."""
    types = get_type_hints(kind)
    expected = {one.name: types[one.name] for one in fields(kind) if one.name not in SET_BY_THE_CHART[kind]}
    given = {name: inner["type"] for name, inner in WHERE[kind]["properties"].items()}
    assert given == {name: JSON_TYPE[of] for name, of in expected.items()}


def test_engine_options_are_fields_of_its_config(newest_helm: Helm) -> None:
    names = {one.name for one in fields(_engine_kind())}
    for name in all_values():
        for pool in (load_values(name).get("workerPools") or {}).values():
            assert set((pool or {}).get("engine", {})) <= names


@pytest.mark.parametrize("name", all_values())
def test_no_setting_is_invented(helm: Helm, name: str) -> None:
    for owner, pod in pods(helm.template(load_values(name))):
        for box in pod["containers"]:
            known = {f"MILLSTREAM_{one.name.upper()}" for kind in KINDS.get(box["name"], []) for one in fields(kind)}
            if box["name"] == "worker":
                known |= {f"MILLSTREAM_{one.name.upper()}" for one in fields(_engine_kind())}
            used = {variable for variable in environment(box) if variable.startswith("MILLSTREAM_")}
            assert used <= known, f"{owner}: {used - known}"


def _as_read(box: dict[str, Any], kinds: list[type], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings as the command line reads them out of a container's environment; a Secret's value is its key."""
    cyclopts = pytest.importorskip("cyclopts")
    flags = pytest.importorskip("millstream.flags")
    read: dict[str, Any] = {}

    def command(**given: Any) -> int:
        read.update({name: value for one in given.values() for name, value in vars(one).items()})
        return 0

    parameters = {f"settings_{number}": kind for number, kind in enumerate(kinds)}
    command.__annotations__ = {**parameters, "return": int}
    command.__signature__ = _signature(parameters)  # type: ignore[attr-defined]
    for variable, value in environment(box).items():
        monkeypatch.setenv(variable, value if isinstance(value, str) else _secret_key(value))
    app = cyclopts.App(name="read", result_action="return_value", exit_on_error=False)
    app.default(flags.takes_settings(command))
    assert app([]) == 0
    return read


def _signature(parameters: dict[str, type]) -> Any:
    import inspect

    return inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in parameters.items()],
        return_annotation=int,
    )


def _secret_key(value: dict[str, Any]) -> str:
    return str(value.get("secretKeyRef", {}).get("key", "downward"))


def test_each_process_reads_what_the_chart_says(newest_helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = newest_helm.template(load_values("production"))
    expected: dict[str, Values] = {
        "-gateway": {
            "host": "0.0.0.0",
            "port": 8080,
            "shutdown_seconds": 20.0,
            "max_body_bytes": 8388608,
            "keepalive_seconds": 7.5,
            "api_keys": "api-keys",
            "cache_secret": "cache-secret",
            "redis_url": "url",
            "blob_url": "s3://payloads/millstream",
        },
        "-dispatcher": {
            "webhook_secret": "webhook-secret",
            "webhook_timeout_seconds": 20.5,
            "webhook_allow": "10.0.0.0/8",
            "celery_url": "url",
        },
        "-pipelines": {"celery_url": "url", "file_roots": "/inputs/books:/inputs/mail", "run_window": 64},
        "-worker-large": {
            "model": "s3://models/llama-3.3-70b",
            "alias": "llama-3.3-70b",
            "drain_seconds": 120.0,
            "metrics_port": 9100,
            "cache_dir": Path("/var/cache/millstream"),
        },
        "-worker-small": {"lease_seconds": 60.0, "record_seconds": 604800.0, "patience_seconds": 12.5},
    }
    for process, values in expected.items():
        kinds = KINDS[process.strip("-").partition("-")[0]]
        with monkeypatch.context() as patched:
            read = _as_read(container(manifests, process), kinds, patched)
        assert {name: read[name] for name in values} == values


def test_what_pipelines_may_read_is_mounted_and_read_only(newest_helm: Helm) -> None:
    manifests = newest_helm.template(load_values("production"))
    box = container(manifests, "-pipelines")
    roots = environment(box)["MILLSTREAM_FILE_ROOTS"].split(":")
    mounts = {mount["mountPath"]: mount for mount in box["volumeMounts"]}
    assert all(mounts[root]["readOnly"] for root in roots)
    assert "MILLSTREAM_FILE_ROOTS" not in environment(container(newest_helm.template(), "-pipelines"))


def test_a_fixed_pool_reads_the_same_settings(newest_helm: Helm) -> None:
    scaled = environment(container(newest_helm.template(), "-worker-default"))
    fixed = environment(container(newest_helm.template({"keda": {"enabled": False}}), "-worker-default"))
    assert scaled == fixed
    assert of_kind(newest_helm.template(), "ScaledObject") and find(newest_helm.template(), "Secret", "-api-keys")
