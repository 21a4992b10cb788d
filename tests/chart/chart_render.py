"""Rendering the chart, and finding one's way in what comes out."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "millstream"
VALUES = Path(__file__).parent / "values"

Manifest = dict[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Helm:
    """One helm binary. Values come as a mapping and reach it on standard input."""

    binary: Path

    def lint(self, values: Values) -> subprocess.CompletedProcess[str]:
        return _helm(self.binary, "lint", "--strict", str(CHART), "--values", "-", values=json.dumps(values))

    def template(self, values: Values | None = None, *, release: str = "ms", namespace: str = "llm") -> list[Manifest]:
        """All manifests, tests included. Fails where helm refuses."""
        done = _template(self.binary, json.dumps(values or {}), release, namespace)
        assert done.returncode == 0, done.stderr
        return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]

    def refusal(self, values: Values) -> str:
        """What helm says against the values. Fails where it takes them."""
        done = _template(self.binary, json.dumps(values), "ms", "llm")
        assert done.returncode != 0, f"helm took {values}"
        return done.stderr


@functools.cache
def _template(binary: Path, values: str, release: str, namespace: str) -> subprocess.CompletedProcess[str]:
    arguments = ["template", release, str(CHART), "--namespace", namespace, "--values", "-"]
    return _helm(binary, *arguments, values=values)


def _helm(binary: Path, *arguments: str, values: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(binary), *arguments], input=values, capture_output=True, text=True, check=False, timeout=60
    )


def load_values(name: str) -> Values:
    """The values file `name` of this folder."""
    values: Values = yaml.safe_load((VALUES / f"{name}.yaml").read_text()) or {}
    return values


def all_values() -> list[str]:
    return sorted(path.stem for path in VALUES.glob("*.yaml"))


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one manifest of that kind whose name ends so."""
    [found] = [one for one in manifests if one["kind"] == kind and one["metadata"]["name"].endswith(name)]
    return found


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """(name, pod spec) of every workload and bare pod."""
    for one in manifests:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]
        elif one["kind"] == "Pod":
            yield one["metadata"]["name"], one["spec"]


def container(manifests: list[Manifest], name: str) -> Manifest:
    """The container of the Deployment whose name ends so."""
    [only] = find(manifests, "Deployment", name)["spec"]["template"]["spec"]["containers"]
    found: Manifest = only
    return found


def environment(box: Manifest) -> dict[str, Any]:
    """Variable -> literal text, or the `valueFrom` mapping. Fails on a variable given twice."""
    names = [entry["name"] for entry in box.get("env", [])]
    assert len(names) == len(set(names)), f"{box['name']}: a variable is given twice in {names}"
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in box.get("env", [])}
