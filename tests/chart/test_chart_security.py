"""No secret stands in a manifest, and no pod may do more than it needs."""

from __future__ import annotations

import re

import pytest

from tests.chart.chart_render import Helm, all_values, container, environment, find, load_values, of_kind, pods

SECRET_VARIABLE = re.compile(r"SECRET|TOKEN$|PASSWORD|API_KEY|REDIS_URL|CELERY_URL|AUTH$")


@pytest.mark.parametrize("name", all_values())
def test_secrets_come_from_secrets(helm: Helm, name: str) -> None:
    for owner, pod in pods(helm.template(load_values(name))):
        for box in pod["containers"]:
            for variable, value in environment(box).items():
                if isinstance(value, str):
                    assert not re.search(r"://[^/@\s]*:[^/@\s]+@", value), f"{owner}: {variable} holds a login"
                    assert not SECRET_VARIABLE.search(variable) or name == "fixed", f"{owner}: {variable}"
                elif SECRET_VARIABLE.search(variable):
                    assert "secretKeyRef" in value


def test_what_was_drawn_stands_only_in_its_secret(helm: Helm) -> None:
    manifests = helm.template()
    drawn = {
        word
        for secret in of_kind(manifests, "Secret")
        for value in secret["stringData"].values()
        for word in re.findall(r"[A-Za-z0-9]{40}", value)
    }
    assert len(drawn) == 3  # Valkey's password, an API key, the cache secret
    rest = repr([one for one in manifests if one["kind"] != "Secret"])
    assert not [word for word in drawn if word in rest]


def test_the_operators_secrets_replace_the_drawn_ones(newest_helm: Helm) -> None:
    manifests = newest_helm.template(load_values("production"))
    assert not of_kind(manifests, "Secret")
    gateway = environment(container(manifests, "-gateway"))
    assert gateway["MILLSTREAM_API_KEYS"] == {"secretKeyRef": {"name": "keys", "key": "api-keys"}}
    assert gateway["MILLSTREAM_CACHE_SECRET"]["secretKeyRef"]["name"] == "keys"
    dispatcher = environment(container(manifests, "-dispatcher"))
    assert dispatcher["MILLSTREAM_WEBHOOK_SECRET"] == {"secretKeyRef": {"name": "webhooks", "key": "webhook-secret"}}
    for process in ("-dispatcher", "-pipelines"):
        broker = environment(container(manifests, process))["MILLSTREAM_CELERY_URL"]
        assert broker == {"secretKeyRef": {"name": "broker", "key": "url"}}
    for process in ("-gateway", "-dispatcher", "-pipelines", "-worker-small"):
        url = environment(container(manifests, process))["MILLSTREAM_REDIS_URL"]
        assert url == {"secretKeyRef": {"name": "store", "key": "url"}}


def test_each_process_may_have_a_login_of_its_own(newest_helm: Helm) -> None:
    values = load_values("production")
    values["redis"]["existingSecret"]["urlKeys"] = {"worker": "url-worker", "dispatcher": "url-dispatcher"}
    manifests = newest_helm.template(values)
    found = {
        process: environment(container(manifests, f"-{process}"))["MILLSTREAM_REDIS_URL"]["secretKeyRef"]
        for process in ("gateway", "dispatcher", "pipelines", "worker-small")
    }
    assert found == {
        "gateway": {"name": "store", "key": "url"},
        "dispatcher": {"name": "store", "key": "url-dispatcher"},
        "pipelines": {"name": "store", "key": "url"},
        "worker-small": {"name": "store", "key": "url-worker"},
    }


def test_the_gateway_is_never_open(newest_helm: Helm) -> None:
    """It listens on all addresses, so it must have keys: drawn at the first install where none are given."""
    manifests = newest_helm.template()
    gateway = environment(container(manifests, "-gateway"))
    assert gateway["MILLSTREAM_HOST"] == "0.0.0.0"
    reference = gateway["MILLSTREAM_API_KEYS"]["secretKeyRef"]
    keys = find(manifests, "Secret", reference["name"])["stringData"]
    assert len(keys["api-keys"]) == len(keys["cache-secret"]) == 40
    assert keys["api-keys"] != keys["cache-secret"]


def test_an_ingress_shows_only_what_wants_a_key(newest_helm: Helm) -> None:
    """/internal and /metrics answer without one."""
    [rule] = find(newest_helm.template(load_values("production")), "Ingress", "-gateway")["spec"]["rules"]
    assert [path["path"] for path in rule["http"]["paths"]] == ["/v1"]


@pytest.mark.parametrize("name", all_values())
def test_pods_are_locked_down(newest_helm: Helm, name: str) -> None:
    for owner, pod in pods(newest_helm.template(load_values(name))):
        assert pod["securityContext"]["runAsNonRoot"] is True, owner
        assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for box in pod["containers"]:
            assert box["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert "memory" in box["resources"]["limits"], owner


@pytest.mark.parametrize("name", all_values())
def test_services_set_no_settings(newest_helm: Helm, name: str) -> None:
    """With service links a Service named `millstream` would set MILLSTREAM_PORT to tcp://10.0.0.1:8080."""
    for owner, pod in pods(newest_helm.template(load_values(name))):
        assert pod["enableServiceLinks"] is False, owner


def test_what_is_written_has_a_volume(newest_helm: Helm) -> None:
    """The root is read-only: every folder that a process is told to write to must be a volume."""
    for _, pod in pods(newest_helm.template()):
        for box in pod["containers"]:
            mounted = [mount["mountPath"] for mount in box.get("volumeMounts", [])]
            for variable in ("MILLSTREAM_CACHE_DIR", "HOME", "HF_HOME", "TRITON_CACHE_DIR", "MILLSTREAM_BLOB_URL"):
                folder = environment(box).get(variable, "/tmp").removeprefix("file://")
                assert not mounted or any(folder.startswith(mount) for mount in mounted), (variable, folder, mounted)


def test_all_processes_share_the_blobs(newest_helm: Helm) -> None:
    for name in ("trial", "fixed", "production"):
        manifests = newest_helm.template(load_values(name))
        workers = [
            one["metadata"]["name"] for one in of_kind(manifests, "Deployment") if "-worker-" in one["metadata"]["name"]
        ]
        places = {
            environment(container(manifests, process))["MILLSTREAM_BLOB_URL"]
            for process in ("-gateway", "-dispatcher", "-pipelines", *workers)
        }
        assert len(places) == 1
        claims = {
            volume["persistentVolumeClaim"]["claimName"]
            for _, pod in pods(manifests)
            for volume in pod.get("volumes", [])
            if volume["name"] == "blobs"
        }
        assert claims == {"trial": {"ms-millstream-blobs"}, "fixed": {"blobs"}, "production": set()}[name]


def test_a_network_policy_closes_what_it_does_not_open(newest_helm: Helm) -> None:
    assert not of_kind(newest_helm.template(), "NetworkPolicy")
    manifests = newest_helm.template({"networkPolicy": {"enabled": True}})
    closed = find(manifests, "NetworkPolicy", "-closed")["spec"]
    assert closed["policyTypes"] == ["Ingress"] and "ingress" not in closed
    [rule] = find(manifests, "NetworkPolicy", "-valkey")["spec"]["ingress"]
    assert rule["ports"] == [{"port": "redis", "protocol": "TCP"}]
    own, keda = rule["from"]
    assert own["podSelector"] == closed["podSelector"]
    assert keda["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "keda"}
    [anyone] = find(manifests, "NetworkPolicy", "-gateway")["spec"]["ingress"]
    assert "from" not in anyone
    [narrow] = find(newest_helm.template(load_values("production")), "NetworkPolicy", "-gateway")["spec"]["ingress"]
    assert len(narrow["from"]) == 3  # the release itself (helm test), KEDA, the ingress
