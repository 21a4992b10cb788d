"""Pools scale by predicted work, wake with it, and sleep only when there is none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from infra.contracts import Tier
from infra.keys import Lane
from infra.settings import GatewaySettings
from tests.chart.chart_render import Helm, Manifest, Values, find, load_values, of_kind

EXTERNAL: Values = {"redis": {"bundled": {"enabled": False}, "url": "redis://store.example.org/4"}}


def _triggers(manifests: list[Manifest], name: str, kind: str) -> list[dict[str, Any]]:
    scaled = find(manifests, "ScaledObject", name)
    return [trigger for trigger in scaled["spec"]["triggers"] if trigger["type"] == kind]


def test_the_backlog_of_the_alias_decides(helm: Helm) -> None:
    manifests = helm.template(load_values("production"))
    for pool, alias in (("small", "smollm2-1.7b"), ("large", "llama-3.3-70b"), ("cpu", "smollm2-135m")):
        [trigger] = _triggers(manifests, f"-worker-{pool}", "metrics-api")
        assert trigger["metricType"] == "AverageValue"  # KEDA falls back for no other
        assert trigger["metadata"] == {
            "url": f"http://ms-millstream-gateway.llm.svc:8080/internal/scale/{alias}",
            "valueLocation": "backlog_seconds",
            "targetValue": "30",
            "activationTargetValue": "0",
        }
        assert "authenticationRef" not in trigger  # the gateway answers this to anyone who can reach it


def test_the_backlog_is_asked_where_the_service_listens(newest_helm: Helm) -> None:
    manifests = newest_helm.template({"gateway": {"service": {"port": 80}}})
    [trigger] = _triggers(manifests, "-worker-default", "metrics-api")
    service = find(manifests, "Service", "-gateway")
    assert service["spec"]["ports"][0]["port"] == 80
    assert trigger["metadata"]["url"].startswith(f"http://{service['metadata']['name']}.llm.svc:80/")


def test_each_lane_and_tier_can_wake_a_pool(helm: Helm) -> None:
    manifests = helm.template(load_values("production"))
    triggers = _triggers(manifests, "-worker-small", "redis-streams")
    streams = {trigger["metadata"]["stream"] for trigger in triggers}
    assert streams == {Lane(number).stream(tier) for number in (2, 7) for tier in Tier}
    assert len(triggers) == len(streams) == 6
    assert len({trigger["name"] for trigger in triggers}) == 6


def test_the_streams_only_wake(newest_helm: Helm) -> None:
    """KEDA 6719, 7835, Redis 13337: a lag that is NULL reads as -1 and lets a pool sleep with work waiting."""
    for name in ("trial", "production"):
        manifests = newest_helm.template(load_values(name))
        for scaled in of_kind(manifests, "ScaledObject"):
            for trigger in scaled["spec"]["triggers"]:
                if trigger["type"] != "redis-streams":
                    continue
                assert not {"consumerGroup", "lagCount", "pendingEntriesCount", "activationLagCount"} & set(
                    trigger["metadata"]
                )
                longest = 1000 * GatewaySettings().max_queue_length
                assert math.ceil(longest / int(trigger["metadata"]["streamLength"])) == 1


def test_a_pool_without_lanes_still_scales(newest_helm: Helm) -> None:
    manifests = newest_helm.template(load_values("production"))
    assert len(_triggers(manifests, "-worker-cpu", "metrics-api")) == 1
    assert _triggers(manifests, "-worker-cpu", "redis-streams") == []


def test_a_gateway_that_is_away_takes_no_worker_away(newest_helm: Helm) -> None:
    for name in ("trial", "production"):
        for scaled in of_kind(newest_helm.template(load_values(name)), "ScaledObject"):
            fallback = scaled["spec"]["fallback"]
            assert fallback["replicas"] >= 1
            assert fallback["behavior"] == "currentReplicasIfHigher"


def test_pools_sleep_by_default_and_need_not(newest_helm: Helm) -> None:
    spec = find(newest_helm.template(), "ScaledObject", "-worker-default")["spec"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 4)
    assert spec["cooldownPeriod"] == 300
    awake = find(newest_helm.template(load_values("production")), "ScaledObject", "-worker-small")["spec"]
    assert (awake["minReplicaCount"], awake["maxReplicaCount"]) == (1, 8)


def test_a_pool_that_is_new_may_load_before_it_sleeps(newest_helm: Helm) -> None:
    """Nothing knows an alias until a first worker has said what it serves: it must not be put to sleep before that."""
    manifests = newest_helm.template({"workerDefaults": {"loadSeconds": 2000, "scaling": {"cooldownSeconds": 100}}})
    spec = find(manifests, "ScaledObject", "-worker-default")["spec"]
    assert spec["initialCooldownPeriod"] == 2100
    deadline = find(manifests, "Deployment", "-gateway")["spec"]["progressDeadlineSeconds"]
    assert deadline > spec["initialCooldownPeriod"]  # the gateway is ready once an alias is known


def _redis(manifests: list[Manifest], name: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Metadata of a pool's first stream trigger, and what it logs in with."""
    trigger = _triggers(manifests, name, "redis-streams")[0]
    if "authenticationRef" not in trigger:
        return trigger["metadata"], []
    authentication = find(manifests, "TriggerAuthentication", trigger["authenticationRef"]["name"])
    return trigger["metadata"], authentication["spec"]["secretTargetRef"]


def test_keda_finds_the_bundled_store(newest_helm: Helm) -> None:
    manifests = newest_helm.template()
    metadata, login = _redis(manifests, "-worker-default")
    assert metadata["address"] == "ms-millstream-valkey.llm.svc:6379"
    assert metadata["databaseIndex"] == "0"
    assert login == [{"parameter": "password", "name": "ms-millstream-valkey", "key": "password"}]
    assert find(manifests, "Secret", "-valkey")["stringData"]["url"].endswith(f"@{metadata['address']}/0")


@pytest.mark.parametrize(
    ("url", "address", "database", "tls"),
    [
        ("redis://store.example.org/4", "store.example.org:6379", "4", None),
        ("redis://store.example.org", "store.example.org:6379", "0", None),
        ("rediss://store.example.org:6380/0?ssl_cert_reqs=required", "store.example.org:6380", "0", "true"),
    ],
)
def test_keda_finds_a_store_by_its_url(
    newest_helm: Helm, url: str, address: str, database: str, tls: str | None
) -> None:
    metadata, login = _redis(newest_helm.template({"redis": {"bundled": {"enabled": False}, "url": url}}), "-default")
    assert (metadata["address"], metadata["databaseIndex"], metadata.get("enableTLS")) == (address, database, tls)
    assert login == []


def test_keda_logs_in_with_the_operators_secret(newest_helm: Helm) -> None:
    metadata, login = _redis(newest_helm.template(load_values("production")), "-worker-small")
    assert (metadata["address"], metadata["enableTLS"]) == ("store.example.org:6380", "true")
    assert login == [
        {"parameter": "username", "name": "store", "key": "username"},
        {"parameter": "password", "name": "store", "key": "password"},
        {"parameter": "ca", "name": "store-tls", "key": "ca.crt"},
        {"parameter": "cert", "name": "store-tls", "key": "tls.crt"},
        {"parameter": "key", "name": "store-tls", "key": "tls.key"},
    ]
