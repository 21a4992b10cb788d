"""What docs/deploy.md says to do can be done."""

from __future__ import annotations

import re
import shlex
import subprocess

import yaml

from tests.chart.chart_render import CHART, ROOT, Helm, Values, container, environment

DEPLOY = (ROOT / "docs" / "deploy.md").read_text()
COMMANDS = [shlex.split(line) for line in re.findall(r"^    helm (.+)$", DEPLOY, re.MULTILINE)]
EXAMPLES: list[Values] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.+?)```", DEPLOY, re.DOTALL)]


def _rendered(helm: Helm, command: list[str]) -> subprocess.CompletedProcess[str]:
    """The command with `template` for its verb, the values of the example standing in for values.yaml."""
    words = [word for word in command if word not in ("install", "upgrade", "--install", "--create-namespace")]
    words = ["-" if word == "values.yaml" else word for word in words]
    line = [str(helm.binary), "template", *words]
    values = yaml.safe_dump(EXAMPLES[0])
    return subprocess.run(line, cwd=ROOT, input=values, capture_output=True, text=True, timeout=60, check=False)


def test_every_command_renders(helm: Helm) -> None:
    assert len(COMMANDS) == 3
    for command in COMMANDS:
        done = _rendered(helm, command)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_the_example_is_what_it_says(newest_helm: Helm) -> None:
    [values] = EXAMPLES
    manifests = newest_helm.template(values)
    worker = environment(container(manifests, "-worker-llama"))
    assert worker["MILLSTREAM_MODEL"] == "s3://models/llama-3.1-8b"
    assert worker["MILLSTREAM_MAX_MODEL_LEN"] == "8192"
    assert environment(container(manifests, "-dispatcher"))["MILLSTREAM_PUBLIC_URL"] == "https://llm.example.org"


def test_what_it_calls_a_value_is_one() -> None:
    """Names in the first column of the table are paths into values.yaml, or into a pool's values."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    names = [name for row in re.findall(r"^\| (`.+?) \|", DEPLOY, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    assert len(names) > 10
    for name in names:
        found = [scope for scope in (defaults, defaults["workerDefaults"]) if _has(scope, name.split("."))]
        assert found, f"docs/deploy.md speaks of {name}, which is no value"


def _has(values: object, path: list[str]) -> bool:
    return not path or (isinstance(values, dict) and path[0] in values and _has(values[path[0]], path[1:]))
