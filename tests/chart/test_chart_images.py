"""The images, read as text: no engine builds them here."""

from __future__ import annotations

import re
import tomllib

from tests.chart.chart_render import ROOT, Helm, of_kind

DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"
Instruction = tuple[str, str]


def _stages() -> dict[str, list[Instruction]]:
    """Stage -> its instructions with those of the stages it is built from before them; continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    stages: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = stages.setdefault(name, [("FROM", base), *stages.get(base, [])])
        else:
            current.append((word, rest))
    return stages


def _last(instructions: list[Instruction], word: str) -> str:
    return [rest for found, rest in instructions if found == word][-1]


def test_both_images_run_as_the_chart_runs_them(newest_helm: Helm) -> None:
    [worker] = [one for one in of_kind(newest_helm.template(), "Deployment") if "worker" in one["metadata"]["name"]]
    user = worker["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    stages = _stages()
    for target, command in (("light", '["gateway"]'), ("worker", '["worker"]')):
        assert _last(stages[target], "USER") == f"{user}:{user}"
        assert [word for word, _ in stages[target]][-1] == "CMD" and _last(stages[target], "CMD") == command
        assert _last(stages[target], "ENTRYPOINT") == '["millstream"]'
        assert "/opt/millstream/bin:$PATH" in " ".join(rest for word, rest in stages[target] if word == "ENV")


def test_only_the_worker_has_the_engine() -> None:
    stages = _stages()

    def installs(stage: str) -> list[str]:
        return [rest for word, rest in stages[stage] if word == "RUN" and "pip install" in rest]

    [copied] = [rest for word, rest in stages["light"] if word == "COPY"]
    assert copied.startswith("--from=build ")
    assert not [line for line in installs("build") if "engine" in line]
    [copied] = [rest for word, rest in stages["worker"] if word == "COPY"]
    assert copied.startswith("--from=build-worker ")
    assert [line for line in installs("build-worker") if "[engine]" in line]
    assert all("-c constraints.txt" in line for stage in ("build", "build-worker") for line in installs(stage))


def test_what_is_copied_exists_and_is_let_through() -> None:
    copied = [
        source
        for word, rest in _stages()["build"]
        if word == "COPY"
        for source in rest.split()[:-1]
    ]  # fmt: skip
    ignore = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert ignore[0] == "*"
    assert sorted(copied) == sorted(line.removeprefix("!") for line in ignore if line.startswith("!"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
