"""Workers live as long as their work needs: slow loads, long drains, no token left behind."""

from __future__ import annotations

import pytest

from tests.chart.chart_render import Helm, Manifest, Values, container, environment, find, load_values, of_kind


def _held_off_seconds(probe: Manifest) -> float:
    """For how long the kubelet asks before it gives up: what a start-up probe holds the liveness probe off."""
    return float(probe.get("initialDelaySeconds", 0) + probe["periodSeconds"] * probe["failureThreshold"])


@pytest.mark.parametrize("load_seconds", [10, 299, 300, 301, 1800])
def test_a_slow_load_is_not_taken_for_a_hang(helm: Helm, load_seconds: int) -> None:
    """KServe 5062: a model that loads for five minutes was restarted for ever by its liveness probe."""
    box = container(helm.template({"workerDefaults": {"loadSeconds": load_seconds}}), "-worker-default")
    assert _held_off_seconds(box["startupProbe"]) >= load_seconds
    assert _held_off_seconds(box["startupProbe"]) < load_seconds + 60
    assert "initialDelaySeconds" not in box["livenessProbe"]
    assert box["startupProbe"]["httpGet"] == box["livenessProbe"]["httpGet"]


def test_by_default_five_minutes_of_loading_are_fine(newest_helm: Helm) -> None:
    deployment = find(newest_helm.template(), "Deployment", "-worker-default")
    [box] = deployment["spec"]["template"]["spec"]["containers"]
    assert _held_off_seconds(box["startupProbe"]) > 300
    assert deployment["spec"]["progressDeadlineSeconds"] > _held_off_seconds(box["startupProbe"])


@pytest.mark.parametrize("drain_seconds", [1, 30, 120])
def test_a_worker_has_15_seconds_beyond_its_drain(helm: Helm, drain_seconds: int) -> None:
    values: Values = {"workerPools": {"default": {"drainSeconds": drain_seconds}}}
    spec = find(helm.template(values), "Deployment", "-worker-default")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == drain_seconds + 15
    assert environment(spec["containers"][0])["MILLSTREAM_DRAIN_SECONDS"] == str(drain_seconds)


def test_the_other_processes_have_time_to_end(newest_helm: Helm) -> None:
    manifests = newest_helm.template(load_values("production"))

    def grace(name: str) -> int:
        spec = find(manifests, "Deployment", name)["spec"]["template"]["spec"]
        return int(spec["terminationGracePeriodSeconds"])

    gateway = container(manifests, "-gateway")
    pause = gateway["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert environment(gateway)["MILLSTREAM_SHUTDOWN_SECONDS"] == "20"
    assert grace("-gateway") == pause + 20 + 15
    assert grace("-dispatcher") == 21 + 15  # a delivery of 20.5 s
    assert grace("-pipelines") == 60 + 15


def test_the_probes_ask_where_the_worker_listens(newest_helm: Helm) -> None:
    box = container(newest_helm.template({"workerDefaults": {"metricsPort": 9999}}), "-worker-default")
    assert box["ports"] == [{"name": "metrics", "containerPort": 9999}]
    assert environment(box)["MILLSTREAM_METRICS_PORT"] == "9999"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert box[probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}


def test_a_store_that_is_away_restarts_no_gateway(newest_helm: Helm) -> None:
    box = container(newest_helm.template(), "-gateway")
    assert box["startupProbe"]["httpGet"]["path"] == box["livenessProbe"]["httpGet"]["path"] == "/healthz"
    assert box["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_only_pools_that_say_their_work_may_patch_pods(newest_helm: Helm) -> None:
    assert not of_kind(newest_helm.template(), "Role")
    manifests = newest_helm.template(load_values("production"))
    [role] = of_kind(manifests, "Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}]
    [binding] = of_kind(manifests, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = binding["subjects"][0]["name"]
    for name, wanted in (("-worker-small", True), ("-worker-cpu", False), ("-gateway", False)):
        spec = find(manifests, "Deployment", name)["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is wanted
        assert (spec["serviceAccountName"] == account) is ("worker" in name)
        assert ("POD_NAME" in environment(spec["containers"][0])) is wanted


def test_an_old_worker_leaves_before_a_new_one_needs_its_gpu(newest_helm: Helm) -> None:
    strategy = find(newest_helm.template(), "Deployment", "-worker-default")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxUnavailable": 1, "maxSurge": 0}
