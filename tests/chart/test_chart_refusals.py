"""Values that are wrong are refused at once, with words that name them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.chart.chart_render import CHART, Helm, Values

SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
POOL = {"model": "smollm2-135m", "alias": "a"}

REFUSED: list[tuple[str, Values, str]] = [
    ("typo at the top", {"gatway": {}}, "gatway"),
    ("typo within", {"gateway": {"replica": 2}}, "replica"),
    ("typo in a pool", {"workerPools": {"default": {"drainSecond": 5}}}, "drainSecond"),
    ("typo deep in a pool", {"workerPools": {"default": {"scaling": {"pollSeconds": 5}}}}, "pollSeconds"),
    ("unknown setting", {"gateway": {"settings": {"max_body_byte": 1}}}, "max_body_byte"),
    ("setting of another process", {"gateway": {"settings": {"lease_seconds": 30}}}, "lease_seconds"),
    ("text for a number", {"workerDefaults": {"loadSeconds": "5m"}}, "loadSeconds"),
    ("half a pod", {"gateway": {"replicas": 1.5}}, "replicas"),
    ("no pods", {"dispatcher": {"replicas": 0}}, "replicas"),
    ("no time to drain", {"workerDefaults": {"drainSeconds": 0}}, "drainSeconds"),
    ("fallback to zero", {"workerDefaults": {"scaling": {"fallbackReplicas": 0}}}, "fallbackReplicas"),
    ("work for no time", {"workerDefaults": {"scaling": {"secondsPerWorker": 0}}}, "secondsPerWorker"),
    ("pool without an alias", {"workerPools": {"b": {"model": "m"}}}, "alias"),
    ("pool's name in capitals", {"workerPools": {"GPU": POOL}}, "GPU"),
    ("pool's name too long", {"workerPools": {"p" * 21: POOL}}, "p" * 21),
    ("alias with a space", {"workerPools": {"b": {"model": "o/n", "alias": "o n"}}}, "alias"),
    ("a password in the URL", {"redis": {"url": "redis://:hush@store:6379/0"}}, "url"),
    ("no Redis URL", {"redis": {"url": "http://store"}}, "url"),
    ("blobs in a pod's own folder", {"blobs": {"url": "file:///tmp/blobs"}}, "url"),
    ("quantity", {"blobs": {"claim": {"size": "10 GB"}}}, "size"),
    ("digest", {"image": {"digest": "latest"}}, "digest"),
    ("service type", {"gateway": {"service": {"type": "ExternalName"}}}, "type"),
    ("privileged port", {"workerDefaults": {"metricsPort": 80}}, "metricsPort"),
    ("a Cluster of no servers", {"redis": {"url": "redis+cluster://"}}, "url"),
    ("sentinels without a service", {"redis": {"url": "redis+sentinel://a:1,b:1"}}, "url"),
    ("a login for no process", {"redis": {"existingSecret": {"urlKeys": {"gatway": "k"}}}}, "gatway"),
    (
        "a Cluster without a broker",
        {"redis": {"bundled": {"enabled": False}, "url": "redis+cluster://a:1,b:1"}},
        "set celery.existingSecret",
    ),
    (
        "lanes behind sentinels",
        {"redis": {"bundled": {"enabled": False}, "url": "redis+sentinel://a:1,b:1/mill/0"}},
        "workerPools.default: lanes are given",
    ),
    ("two stores", {"redis": {"url": "redis://store:6379/0"}}, "exactly one of redis.bundled.enabled=true"),
    ("no store", {"redis": {"bundled": {"enabled": False}}}, "exactly one of redis.bundled.enabled=true"),
    (
        "two places for blobs",
        {"blobs": {"url": "s3://b/p", "claim": {"existingClaim": "c"}}},
        "blobs.url or blobs.claim.existingClaim",
    ),
    ("fewest above most", {"workerPools": {"default": {"replicas": {"min": 5, "max": 2}}}}, "replicas.min 5 is above"),
    (
        "fallback above most",
        {"workerPools": {"default": {"replicas": {"max": 1}, "scaling": {"fallbackReplicas": 2}}}},
        "workerPools.default: scaling.fallbackReplicas",
    ),
    (
        "gateway's fewest above most",
        {"gateway": {"autoscaling": {"minReplicas": 20}}},
        "gateway.autoscaling: minReplicas",
    ),
    (
        "one lane, two aliases",
        {"workerPools": {"z": {"model": "m", "alias": "b", "lanes": [1]}}},
        'lane 1 belongs to alias "smollm2-135m"',
    ),
    (
        "KEDA without an address",
        {"redis": {"bundled": {"enabled": False}, "existingSecret": {"name": "s"}}},
        "set redis.address to host:port",
    ),
    ("ingress without hosts", {"gateway": {"ingress": {"enabled": True}}}, "gateway.ingress.hosts is empty"),
    ("a secret as text", {"extraEnv": [{"name": "HF_TOKEN", "value": "hf_x"}]}, "HF_TOKEN looks like a secret"),
    (
        "a setting by the back door",
        {"extraEnv": [{"name": "MILLSTREAM_PORT", "value": "1"}]},
        "MILLSTREAM_PORT is a setting",
    ),
    ("a variable without a value", {"extraEnv": [{"name": "A"}]}, "extraEnv"),
]


@pytest.mark.parametrize(("values", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_wrong_values_are_refused(helm: Helm, values: Values, words: str) -> None:
    assert words in helm.refusal(values)


def test_variables_that_only_sound_secret_are_taken(newest_helm: Helm) -> None:
    harmless = ["TOKENIZERS_PARALLELISM", "AWS_WEB_IDENTITY_TOKEN_FILE", "MAX_TOKENS_HINT"]
    newest_helm.template({"extraEnv": [{"name": name, "value": "x"} for name in harmless]})


def _objects(schema: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield where, schema
        for key, inner in schema.items():
            yield from _objects(inner, f"{where}/{key}")
    elif isinstance(schema, list):
        for number, inner in enumerate(schema):
            yield from _objects(inner, f"{where}/{number}")


def test_no_object_with_named_fields_takes_others() -> None:
    open_ones = [
        where for where, one in _objects(SCHEMA) if "properties" in one and one.get("additionalProperties") is not False
    ]
    assert open_ones == []


def _fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The named fields of a schema, behind its reference."""
    if "$ref" in schema:
        target: Any = SCHEMA
        for step in schema["$ref"].removeprefix("#/").split("/"):
            target = target[step]
        return _fields(target)
    return schema.get("properties", {}) if schema.get("type") == "object" else {}


def _undocumented(schema: dict[str, Any], values: Any, where: str) -> Iterator[str]:
    for name, inner in _fields(schema).items():
        if not isinstance(values, dict) or name not in values:
            yield f"{where}.{name}"
        elif inner.get("type") != "array":
            yield from _undocumented(inner, values[name], f"{where}.{name}")


def test_every_value_of_the_schema_stands_in_the_values_file() -> None:
    """But fields of `settings` and `engine`, written down elsewhere, those of `urlKeys`, which its comment names, and
    helm's own `global`."""
    elsewhere = (".settings.", ".engine.", ".urlKeys.")
    missing = _undocumented(SCHEMA, DEFAULTS, "")
    assert [path for path in missing if not any(part in path for part in elsewhere)] == [".global"]


def test_a_pool_may_set_all_that_the_defaults_set() -> None:
    pool, defaults = SCHEMA["definitions"]["pool"]["properties"], SCHEMA["definitions"]["worker"]["properties"]
    assert set(pool) == set(defaults) | {"model", "alias"}
    assert all(pool[name]["$ref"] == f"#/definitions/worker/properties/{name}" for name in defaults)
