"""Panels kept on disk: the same logits without packing, for folders of ours alone, and only while they hold."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from engine.models import panels_file
from engine.models.native import NativeDecoder
from engine.models.packed import PackedWeights
from engine.models.panels_file import PanelsFile
from engine.weights.cache import LAYOUT_VERSION, MANIFEST, Manifest, write_manifest
from kernels.cpu import library
from tests.conftest import need_native_path
from tests.engine.runner_aids import direct_logits
from tests.engine.runner_aids import load as load_model
from tests.models import make_tiny_model

PROMPT = list(range(3, 60))


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    need_native_path()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in the cache."""
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path))
    return converted(tmp_path / "models" / "tiny")


def converted(folder: Path, seed: int = 0) -> Path:
    make_tiny_model(folder, seed=seed)
    write_manifest(folder, Manifest(LAYOUT_VERSION, "source", "weights", "tokenizer"))
    return folder


def logits_of(folder: Path, dtype: str = "auto") -> torch.Tensor:
    """After a start."""
    return direct_logits(load_model(folder, dtype=dtype), PROMPT)


def packed_of(folder: Path) -> PackedWeights:
    decoder = load_model(folder).runner.decoder  # type: ignore[attr-defined]
    assert isinstance(decoder, NativeDecoder)
    return decoder.packed


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.panels"))


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_later_start_needs_no_weights_and_gives_the_same_logits(folder: Path, dtype: str) -> None:
    expected = logits_of(folder, dtype)
    assert len(kept(folder)) == 1
    weights = folder / "model.safetensors"
    before = weights.stat()
    weights.write_bytes(bytes(before.st_size))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert torch.equal(logits_of(folder, dtype), expected)


def test_each_dtype_has_its_own(folder: Path) -> None:
    float32, int8 = logits_of(folder), logits_of(folder, "int8")
    assert len(kept(folder)) == 2
    assert torch.equal(logits_of(folder), float32)
    assert torch.equal(logits_of(folder, "int8"), int8)


def test_tensors_begin_on_cache_lines(folder: Path) -> None:
    packed_of(folder)
    packed = packed_of(folder)
    assert {tensor.data_ptr() % 64 for tensor in packed.tensors.values()} == {0}


@pytest.mark.parametrize("has_manifest", [False, True])
def test_a_folder_outside_the_cache_is_left_as_it_is(
    folder: Path, tmp_path: Path, has_manifest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was copied from the cache."""
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    if not has_manifest:
        (own / MANIFEST).unlink()
    monkeypatch.setenv("MILLSTREAM_CACHE_DIR", str(tmp_path / "models"))
    before = sorted(own.iterdir())
    logits_of(own)
    assert sorted(own.iterdir()) == before


@pytest.mark.parametrize("change", ["weights", "manifest"])
def test_other_weights_are_packed_anew(folder: Path, tmp_path: Path, change: str) -> None:
    logits_of(folder)
    other = converted(tmp_path / "models" / "other", seed=1)
    expected = logits_of(other)
    before = (folder / "model.safetensors").stat()
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    if change == "manifest":  # as where a folder is replaced within the clock's resolution
        os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
        write_manifest(folder, Manifest(LAYOUT_VERSION, "source", "other weights", "tokenizer"))
    for _ in range(2):  # packed, then read
        assert torch.equal(logits_of(folder), expected)
    assert len(kept(folder)) == 1


def test_weights_that_change_meanwhile_are_not_kept(folder: Path) -> None:
    source = panels_file.source_of(folder)
    assert source is not None
    file = PanelsFile(folder, source, library.load(), "float32")
    packed = packed_of(folder)
    kept(folder)[0].unlink()
    write_manifest(folder, Manifest(LAYOUT_VERSION, "source", "other weights", "tokenizer"))
    file.keep(packed)
    assert kept(folder) == []


@pytest.mark.parametrize("damage", ["empty", "half", "head", "not JSON", "a shape"])
def test_a_damaged_file_is_told_and_made_anew(folder: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = logits_of(folder)
    (path,) = kept(folder)
    whole = path.read_bytes()
    broken = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "head": whole[:40],
        "not JSON": b"\xff" * len(whole),
        "a shape": whole.replace(b'["float32", [', b'["float32", [7', 1),
    }
    path.write_bytes(broken[damage])
    assert torch.equal(logits_of(folder), expected)
    assert "packed anew" in caplog.text
    assert path.read_bytes() == whole


def test_what_others_have_left_goes_after_a_day(folder: Path) -> None:
    name = library.load().variant.name
    names = [f"{name}-0123-float32.panels", f"{name}-0123-int8.panels", f"{name}-dot-0123-float32.panels", ".panels-x"]
    for each in names:
        (folder / each).touch()
        os.utime(folder / each, (0, 0))
    fresh = folder / f"{name}-4567-float32.panels"
    fresh.touch()
    logits_of(folder)
    assert [(folder / each).exists() for each in names] == [False, True, True, False]
    assert fresh.exists()


def test_a_full_disk_is_told_and_harmless(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(panels_file, "_ROOM", 10**18)
    caplog.set_level("INFO", panels_file.__name__)
    logits_of(folder)
    assert kept(folder) == []
    assert "is not kept: the disk has less than" in caplog.text


def test_what_cannot_be_written_leaves_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = panels_file.source_of(folder)
    assert source is not None
    packed = packed_of(folder)
    (path,) = kept(folder)
    path.unlink()
    path.mkdir()  # no file can take its name
    caplog.set_level("INFO", panels_file.__name__)
    PanelsFile(folder, source, library.load(), "float32").keep(packed)
    assert "is not kept" in caplog.text
    assert list(folder.glob(".panels-*")) == []
