"""One settings field, three ways to say it: flag, variable, file; in that order of strength."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest
from cyclopts import App

from engine.config import EngineConfig
from infra.settings import (
    DispatcherSettings,
    GatewaySettings,
    PipelineSettings,
    QueueSettings,
    StoreSettings,
    WorkerSettings,
)
from millstream.environment import environment_of
from millstream.errors import UsageError
from millstream.flags import CONVENTIONAL, from_environment, settings_kinds, takes_settings, variables_of
from millstream.toml_file import apply_toml, read_settings

Parsed = tuple[StoreSettings, WorkerSettings, EngineConfig]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MILLSTREAM_") or name in CONVENTIONAL.values():
            monkeypatch.delenv(name)


def parse(*arguments: str) -> Parsed:
    """What a command that takes these settings is called with."""
    seen: list[Parsed] = []

    @takes_settings
    def command(store: StoreSettings, settings: WorkerSettings, engine: EngineConfig) -> int:
        seen.append((store, settings, engine))
        return 0

    app = App(config=[apply_toml], result_action="return_value", exit_on_error=False, print_error=False)
    app.default(command)
    assert app(list(arguments)) == 0
    return seen[0]


def test_without_arguments_the_dataclasses_defaults() -> None:
    assert parse() == (StoreSettings(), WorkerSettings(), EngineConfig())


def test_flag_over_variable_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "millstream.toml"
    config.write_text("lease_seconds = 11\nrenew_seconds = 2.5\nmax_num_seqs = 7\nport = 9999\n")

    def leases(*arguments: str) -> float:
        return parse(*arguments)[1].lease_seconds

    assert leases() == 30.0
    assert leases("--config", str(config)) == 11.0
    monkeypatch.setenv("MILLSTREAM_LEASE_SECONDS", "12")
    assert leases("--config", str(config)) == 12.0
    assert leases("--config", str(config), "--lease-seconds", "13") == 13.0
    monkeypatch.setenv("MILLSTREAM_CONFIG", str(config))
    _, worker, engine = parse()
    assert (worker.renew_seconds, engine.max_num_seqs) == (2.5, 7)


def test_file_holds_every_type(tmp_path: Path) -> None:
    config = tmp_path / "one.toml"
    config.write_text(
        'redis_url = "redis://store:6379/1"\ncache_dir = "/var/cache/ms"\nenable_prefix_caching = false\n'
        'max_model_len = 2048\ngpu_memory_utilization = 0.5\npreemption_mode = "swap"\n'
    )
    store, _, engine = parse("--config", str(config))
    assert store == StoreSettings(redis_url="redis://store:6379/1", cache_dir=Path("/var/cache/ms"))
    assert engine == EngineConfig(
        enable_prefix_caching=False, max_model_len=2048, gpu_memory_utilization=0.5, preemption_mode="swap"
    )


@pytest.mark.parametrize(
    ("variable", "value", "read"),
    [
        ("REDIS_URL", "redis://a/0", lambda p: p[0].redis_url == "redis://a/0"),
        ("MODEL_NAME", "fake", lambda p: p[1].model == "fake"),
        ("MAX_MODEL_LEN", "512", lambda p: p[2].max_model_len == 512),
        ("GPU_MEMORY_UTILIZATION", "0.25", lambda p: p[2].gpu_memory_utilization == 0.25),
        ("MAX_NUM_SEQS", "3", lambda p: p[2].max_num_seqs == 3),
    ],
)
def test_conventional_variables(variable: str, value: str, read: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    assert callable(read)
    assert read(parse())


def test_our_own_variable_wins_over_the_conventional_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_NUM_SEQS", "3")
    monkeypatch.setenv("MILLSTREAM_MAX_NUM_SEQS", "4")
    assert parse()[2].max_num_seqs == 4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("lease_second = 3\n", "no setting 'lease_second'; did you mean 'lease_seconds'?"),
        ("[worker]\nmodel = 'fake'\n", "no setting 'worker'"),
        ("[model]\nname = 'fake'\n", "'model' is a table"),
        ("lease_seconds = \n", "not valid TOML"),
    ],
)
def test_file_that_cannot_be_used(content: str, words: str, tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(content)
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        read_settings(config)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        parse("--config", str(tmp_path / "nowhere.toml"))


def test_a_value_that_the_settings_refuse_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"block_size: is 7; choose one of 8, 16, 32, 64"):
        parse("--block-size", "7")


def test_a_name_means_one_thing() -> None:
    """A name is one flag and one variable, so kinds of settings that share it must mean the same by it."""
    meanings: dict[str, set[tuple[object, object]]] = {}
    for kind in settings_kinds().values():
        hints = get_type_hints(kind)
        for one in fields(kind):
            meanings.setdefault(one.name, set()).add((hints[one.name], one.default))
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


def test_a_shared_name_is_one_flag_that_feeds_both() -> None:
    seen: list[tuple[DispatcherSettings, PipelineSettings]] = []

    @takes_settings
    def command(dispatcher: DispatcherSettings, pipelines: PipelineSettings) -> int:
        seen.append((dispatcher, pipelines))
        return 0

    app = App(result_action="return_value", exit_on_error=False, print_error=False)
    app.default(command)
    assert app(["--celery-url", "redis://broker/1", "--run-window", "3"]) == 0
    assert seen == [
        (
            DispatcherSettings(celery_url="redis://broker/1"),
            PipelineSettings(celery_url="redis://broker/1", run_window=3),
        )
    ]


def test_every_setting_survives_the_way_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` hands its settings to its children as variables: what they read is what it had."""
    store = StoreSettings(redis_url="redis://:secret@h/0", cache_dir=Path("/c d"))
    worker = replace(WorkerSettings(), model="fake", alias="a", lease_seconds=1.5, renew_seconds=0.5, metrics_port=9)
    engine = replace(EngineConfig(), enable_prefix_caching=False, max_model_len=99, max_step_seconds=0.125)
    base = {"PATH": "/bin", "MAX_NUM_SEQS": "1", "MILLSTREAM_RENEW_SECONDS": "1", "MILLSTREAM_CONFIG": "/x.toml"}
    spoken = environment_of(store, worker, engine, base=base)
    assert spoken["PATH"] == "/bin"
    assert not {"MAX_NUM_SEQS", "MILLSTREAM_CONFIG", "MILLSTREAM_BLOB_URL"} & spoken.keys()
    for name, value in spoken.items():
        monkeypatch.setenv(name, value)
    assert parse() == (store, worker, engine)


def test_help_says_what_each_setting_is(capsys: pytest.CaptureFixture[str]) -> None:
    from millstream.cli import main

    assert main(["gateway", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "anything but loopback is refused as long as no API key exists" in shown
    for one in (*fields(StoreSettings), *fields(GatewaySettings)):
        assert f"--{one.name.replace('_', '-')}" in shown
        assert variables_of(one.name)[0] in shown


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MILLSTREAM_LEASE_SECOND", "did you mean MILLSTREAM_LEASE_SECONDS?"),
        ("MILLSTREAM_RECORDS_SECONDS", "did you mean MILLSTREAM_RECORD_SECONDS?"),
        ("MILLSTREAM_ZZZZ", "unset it"),
    ],
)
def test_a_misspelt_variable_is_refused(name: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match=re.escape(f"the environment variable {name} is no setting")) as refusal:
        from_environment(WorkerSettings)
    assert hint in str(refusal.value)


def test_variables_that_are_no_settings_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLSTREAM_URL", "MILLSTREAM_API_KEY", "MILLSTREAM_TETHER", "MILLSTREAMS", "XMILLSTREAM_A"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MILLSTREAM_RECORD_SECONDS", "60")
    assert from_environment(QueueSettings).record_seconds == 60.0
