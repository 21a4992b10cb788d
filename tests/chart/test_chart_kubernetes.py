"""What is rendered is what Kubernetes and KEDA take, and its parts find each other."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from tests.chart.chart_render import Helm, Manifest, all_values, find, load_values, of_kind, pods
from tests.chart.chart_tools import keda_models, or_skip

VERSIONS = [
    "1.33",
    kubernetes_validate.latest_version().rpartition(".")[0],
]  # the oldest and the newest schemas that there are

Complaints = Callable[[list[Manifest]], list[str]]


def _is_keda(manifest: Manifest) -> bool:
    return bool(manifest["apiVersion"].startswith("keda.sh/"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", all_values())
def test_kubernetes_takes_every_manifest(newest_helm: Helm, name: str, version: str) -> None:
    for manifest in newest_helm.template(load_values(name)):
        if not _is_keda(manifest):
            validated = kubernetes_validate.validate(manifest, version, strict=True)
            assert validated == version


@pytest.fixture(scope="module")
def keda_complaints() -> Complaints:
    """Manifests -> what KEDA's own schemas say against them."""
    command = ["node", str(Path(__file__).with_name("validate_keda.mjs")), str(or_skip(keda_models))]

    def complaints(manifests: list[Manifest]) -> list[str]:
        done = subprocess.run(command, input=json.dumps(manifests), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found: list[str] = json.loads(done.stdout)
        return found

    return complaints


@pytest.mark.parametrize("name", ["trial", "production"])
def test_keda_takes_its_manifests(newest_helm: Helm, name: str, keda_complaints: Complaints) -> None:
    manifests = [one for one in newest_helm.template(load_values(name)) if _is_keda(one)]
    assert {one["kind"] for one in manifests} == {"ScaledObject", "TriggerAuthentication"}
    assert keda_complaints(manifests) == []


def test_keda_would_say_what_is_wrong(newest_helm: Helm, keda_complaints: Complaints) -> None:
    scaled = json.loads(json.dumps(of_kind(newest_helm.template(), "ScaledObject")[0]))
    scaled["spec"]["triggers"][0]["metadata"]["targetValue"] = 30
    scaled["spec"]["fallback"]["behavior"] = "hope"
    [words] = keda_complaints([scaled])
    assert "targetValue" in words and "behavior" in words


# The schemas let unknown fields pass, as the cluster would drop them in silence. These are all that KEDA reads.
SCALED_OBJECT = {
    "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod",
    "initialCooldownPeriod", "idleReplicaCount", "fallback", "advanced", "triggers",
}  # fmt: skip
TRIGGER = {"type", "name", "metricType", "metadata", "authenticationRef", "useCachedMetrics"}
TRIGGER_METADATA = {
    "metrics-api": {"url", "valueLocation", "targetValue", "activationTargetValue", "unsafeSsl", "format"},
    "redis-streams": {"address", "stream", "streamLength", "databaseIndex", "enableTLS", "unsafeSsl"},
}
TRIGGER_SECRETS = {"username", "password", "ca", "cert", "key"}


@pytest.mark.parametrize("name", ["trial", "production"])
def test_keda_reads_every_field(newest_helm: Helm, name: str) -> None:
    manifests = newest_helm.template(load_values(name))
    for scaled in of_kind(manifests, "ScaledObject"):
        assert set(scaled["spec"]) <= SCALED_OBJECT
        for trigger in scaled["spec"]["triggers"]:
            assert set(trigger) <= TRIGGER
            assert set(trigger["metadata"]) <= TRIGGER_METADATA[trigger["type"]]
    for authentication in of_kind(manifests, "TriggerAuthentication"):
        assert {entry["parameter"] for entry in authentication["spec"]["secretTargetRef"]} <= TRIGGER_SECRETS


def _matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


@pytest.mark.parametrize("name", all_values())
def test_selectors_find_their_pods_and_no_others(newest_helm: Helm, name: str) -> None:
    manifests = newest_helm.template(load_values(name))
    workloads = [one for one in manifests if one["kind"] in ("Deployment", "StatefulSet")]
    labels = {one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one in workloads}
    for one in workloads:
        selector = one["spec"]["selector"]["matchLabels"]
        assert [owner for owner, found in labels.items() if _matches(selector, found)] == [one["metadata"]["name"]]
    for service in of_kind(manifests, "Service"):
        [owner] = [owner for owner, found in labels.items() if _matches(service["spec"]["selector"], found)]
        ports = find(workloads, "StatefulSet" if owner.endswith("valkey") else "Deployment", owner)
        [box] = ports["spec"]["template"]["spec"]["containers"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= {port["name"] for port in box["ports"]}
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [owner for owner, found in labels.items() if _matches(selector, found)] == [budget["metadata"]["name"]]


@pytest.mark.parametrize("name", all_values())
def test_what_is_referred_to_exists(newest_helm: Helm, name: str) -> None:
    manifests = newest_helm.template(load_values(name))
    made = {(one["kind"], one["metadata"]["name"]) for one in manifests}
    for owner, pod in pods(manifests):
        assert ("ServiceAccount", pod["serviceAccountName"]) in made
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {
            claim["metadata"]["name"]
            for one in of_kind(manifests, "StatefulSet")
            if one["metadata"]["name"] == owner
            for claim in one["spec"]["volumeClaimTemplates"]
        }
        for box in pod["containers"]:
            mounts = [mount["name"] for mount in box.get("volumeMounts", [])]
            assert set(mounts) == volumes or "-test" in owner, f"{owner}: {mounts} of {volumes}"
            ports = {port["name"] for port in box.get("ports", [])}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if "httpGet" in box.get(probe, {}):
                    assert box[probe]["httpGet"]["port"] in ports
    for scaler in [*of_kind(manifests, "ScaledObject"), *of_kind(manifests, "HorizontalPodAutoscaler")]:
        assert ("Deployment", scaler["spec"]["scaleTargetRef"]["name"]) in made
        for trigger in scaler["spec"].get("triggers", []):
            if "authenticationRef" in trigger:
                assert ("TriggerAuthentication", trigger["authenticationRef"]["name"]) in made
    for ingress in of_kind(manifests, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                assert ("Service", path["backend"]["service"]["name"]) in made
