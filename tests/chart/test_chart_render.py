"""The chart lints and renders with both helms, whatever is turned on, and both make the same of it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.chart.chart_render import Helm, Manifest, all_values, container, environment, find, load_values, of_kind
from tests.chart.chart_tools import HELMS, helm_binary, or_skip


@pytest.mark.parametrize("name", all_values())
def test_it_lints_and_renders(helm: Helm, name: str) -> None:
    done = helm.lint(load_values(name))
    assert done.returncode == 0, done.stdout + done.stderr
    manifests = helm.template(load_values(name))
    kinds = {one["kind"] for one in manifests}
    assert {"Deployment", "Service", "ServiceAccount", "Pod"} <= kinds
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(names) == len(set(names))


def _without_drawn(manifests: list[Manifest]) -> list[str]:
    """As sorted JSON, less what is drawn anew at each rendering."""
    return sorted(
        json.dumps({**one, "stringData": sorted(one["stringData"])} if "stringData" in one else one, sort_keys=True)
        for one in manifests
    )


@pytest.mark.parametrize("name", all_values())
def test_helms_agree(name: str) -> None:
    rendered = [Helm(or_skip(partial(helm_binary, version))).template(load_values(name)) for version in HELMS]
    assert _without_drawn(rendered[0]) == _without_drawn(rendered[1])


def test_each_process_has_its_command(newest_helm: Helm) -> None:
    manifests = newest_helm.template()
    for process in ("gateway", "dispatcher", "pipelines"):
        box = container(manifests, f"-{process}")
        assert (box["args"], box["image"]) == ([process], "millstream:0.1.0")
    worker = container(manifests, "-worker-default")
    assert (worker["args"], worker["image"]) == (["worker"], "millstream-worker:0.1.0")


def test_a_digest_wins_over_a_tag(newest_helm: Helm) -> None:
    manifests = newest_helm.template(load_values("production"))
    assert container(manifests, "-gateway")["image"] == f"registry.example.org/millstream@sha256:{'0' * 64}"


def test_whole_numbers_stay_whole(helm: Helm) -> None:
    """Helm reads 8388608 as a float; printed carelessly it is 8.388608e+06, which is no integer for the gateway."""
    manifests = helm.template({"gateway": {"settings": {"max_body_bytes": 8388608, "keepalive_seconds": 0.5}}})
    variables = environment(container(manifests, "-gateway"))
    assert variables["MILLSTREAM_MAX_BODY_BYTES"] == "8388608"
    assert variables["MILLSTREAM_KEEPALIVE_SECONDS"] == "0.5"


def test_long_names_stay_within_63_characters(helm: Helm) -> None:
    pool = "p" * 20
    values = {"workerPools": {pool: {"model": "smollm2-135m", "alias": "a" * 128}}}
    manifests = helm.template(values, release="r" * 53)
    for one in manifests:
        assert len(one["metadata"]["name"]) <= 63, one["metadata"]["name"]
        assert all(len(str(value)) <= 63 for value in one["metadata"].get("labels", {}).values())
    assert find(manifests, "Deployment", f"-worker-{pool}")


def test_the_default_pool_can_be_dropped(helm: Helm) -> None:
    values = {"workerPools": {"default": None, "b": {"model": "smollm2-135m", "alias": "b"}}}
    names = [one["metadata"]["name"] for one in of_kind(helm.template(values), "ScaledObject")]
    assert names == ["ms-millstream-worker-b"]


def test_a_pool_starts_from_the_defaults_and_overrides_them(newest_helm: Helm) -> None:
    manifests = newest_helm.template(load_values("production"))
    small, large, cpu = (
        find(manifests, "Deployment", f"-worker-{name}")["spec"]["template"]["spec"]
        for name in ("small", "large", "cpu")
    )
    assert small["nodeSelector"] == {"pool": "gpu"}
    assert large["nodeSelector"] == {"pool": "gpu", "size": "big"}
    assert small["tolerations"] == large["tolerations"] != []
    assert "tolerations" not in cpu
    assert small["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert large["containers"][0]["resources"]["limits"] == {"memory": "256Gi", "nvidia.com/gpu": 4}
    assert "nvidia.com/gpu" not in cpu["containers"][0]["resources"]["limits"]
    assert large["runtimeClassName"] == "nvidia"
    assert "runtimeClassName" not in small
    claims = {volume["name"]: volume for volume in large["volumes"]}
    assert claims["cache"]["persistentVolumeClaim"] == {"claimName": "models"}


def test_autoscalers_own_the_number_of_pods(newest_helm: Helm) -> None:
    """A `replicas` beside an autoscaler would set the number back at each upgrade."""
    scaled = newest_helm.template(load_values("production"))
    for name in ("-gateway", "-worker-small", "-worker-large"):
        assert "replicas" not in find(scaled, "Deployment", name)["spec"]
    fixed = newest_helm.template(load_values("fixed"))
    assert not of_kind(fixed, "ScaledObject")
    assert find(fixed, "Deployment", "-worker-default")["spec"]["replicas"] == 3
    asleep = newest_helm.template({"keda": {"enabled": False}})
    assert find(asleep, "Deployment", "-worker-default")["spec"]["replicas"] == 1
