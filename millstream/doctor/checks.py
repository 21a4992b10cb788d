"""One function a check: looks at one thing, says what it found, and how to mend it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from infra.settings import GatewaySettings, StoreSettings, WorkerSettings

MIN_PYTHON = (3, 11)
NEEDED_FREE_BYTES = 200 * 2**20  # below it nothing can be kept
WANTED_FREE_BYTES = 2 * 2**30  # a converted model, the server's data, blobs
WANTED_MEMORY_BYTES = 2 * 2**30  # weights of the default model, its KV pool, torch itself


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # it works, but worse or not for everything
    PROBLEM = "problem"  # something cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    level: Level
    detail: str
    remedy: str | None = None  # None where there is nothing to mend


def findings(store: StoreSettings, gateway: GatewaySettings, worker: WorkerSettings) -> Iterator[Finding]:
    """Every check, in the order in which a newcomer would meet the problems."""
    yield check_python(sys.version_info[:3])
    yield check_package("torch", 'pip install torch, or: pip install "millstream[engine]"')
    yield check_server(store)
    yield check_model(worker.model, store.cache)
    yield check_disk(store.cache)
    yield check_memory(Path("/proc/meminfo"))
    yield check_compiler(shutil.which)
    yield check_port(gateway.host, gateway.port)


def check_python(version: tuple[int, ...]) -> Finding:
    shown = ".".join(map(str, version))
    if version < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        return Finding("python", Level.PROBLEM, f"{shown} is too old", f"install Python {wanted} or newer")
    return Finding("python", Level.OK, f"{shown} at {sys.executable}")


def check_package(name: str, remedy: str) -> Finding:
    """Whether a package that workers need can really be imported, not just found."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        return Finding(name, Level.PROBLEM, f"workers cannot run a model: {error}", remedy)
    return Finding(name, Level.OK, importlib.metadata.version(name))


def check_server(store: StoreSettings) -> Finding:
    """The server that is named answers, or there is one to embed."""
    if store.redis_url is not None:
        return _check_named_server(store.redis_url)
    from infra.embedded import server_binary
    from infra.errors import MillstreamError

    try:
        program = server_binary()
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (MillstreamError, OSError, subprocess.SubprocessError) as error:
        remedy = "put valkey-server 8 or redis-server 7 on PATH, or name a running one with REDIS_URL"
        return Finding("server", Level.PROBLEM, str(error), remedy)
    return Finding("server", Level.OK, f"{' '.join(shown.split()[:3])} at {program}")


def _check_named_server(url: str) -> Finding:
    from infra.connect import Server, probe
    from infra.errors import MillstreamError

    async def asked() -> dict[str, Any]:
        server = Server(url)
        try:
            await probe(server)
            about: dict[str, Any] = (await server.everywhere("INFO", "server"))[0]
            return about
        finally:
            await server.close()

    where = url.rpartition("@")[2].rpartition("://")[2].partition("?")[0]  # without its password
    try:
        info = asyncio.run(asked())
    except MillstreamError as error:
        return Finding("server", Level.PROBLEM, f"{where}: {error}", "start it, or correct REDIS_URL")
    name = info.get("server_name", "redis")
    version = info.get("valkey_version", info.get("redis_version", "?"))
    return Finding("server", Level.OK, f"{name} {version} at {where}")


def check_model(model: str, cache: Path) -> Finding:
    """Whether the worker's model is ready to load, without fetching or converting anything."""
    from engine.weights.catalog import CATALOG

    if model == "fake":
        return Finding("model", Level.OK, "fake needs no weights")
    if model not in CATALOG:
        if Path(model).expanduser().exists() or "/" in model:
            return Finding("model", Level.OK, f"{model} is read when a worker starts")
        aliases = ", ".join(CATALOG)
        return Finding("model", Level.PROBLEM, f"{model} is neither an alias nor a path", f"name one of: {aliases}")
    folder = cache / "models" / model
    if (folder / "config.json").exists():
        return Finding("model", Level.OK, f"{model} is ready in {folder}")
    detail = f"{model} is not in {cache} yet; the first worker fetches and converts it"
    return Finding("model", Level.WARNING, detail, f"fetch it now: {sys.executable} -P -m engine.weights.fetch {model}")


def check_disk(folder: Path) -> Finding:
    """Room for models, the embedded server's data and blobs, and whether they may be written."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        return Finding("disk", Level.PROBLEM, f"{there} is no folder", "name another: MILLSTREAM_CACHE_DIR")
    if not os.access(there, os.W_OK):
        return Finding(
            "disk", Level.PROBLEM, f"{there} may not be written", "name another folder: MILLSTREAM_CACHE_DIR"
        )
    return judge_disk(folder, shutil.disk_usage(there).free)


def judge_disk(folder: Path, free_bytes: int) -> Finding:
    detail = f"{free_bytes / 2**30:.1f} GiB free for {folder}"
    remedy = "free some space, or name a folder on another disk: MILLSTREAM_CACHE_DIR"
    if free_bytes < NEEDED_FREE_BYTES:
        return Finding("disk", Level.PROBLEM, detail, remedy)
    if free_bytes < WANTED_FREE_BYTES:
        return Finding("disk", Level.WARNING, detail, remedy)
    return Finding("disk", Level.OK, detail)


def check_memory(meminfo: Path) -> Finding:
    """What the kernel says is available (proc(5), /proc/meminfo)."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    detail = f"{available_bytes / 2**30:.1f} GiB available"
    if available_bytes < WANTED_MEMORY_BYTES:
        remedy = "end other programs, or give the KV pool less: MILLSTREAM_KV_CACHE_MEMORY_BYTES"
        return Finding("memory", Level.WARNING, detail, remedy)
    return Finding("memory", Level.OK, detail)


def check_compiler(which: Callable[[str], str | None]) -> Finding:
    """A C++ compiler speeds the CPU up where native kernels are built; everything works without one."""
    for name in ("c++", "g++", "clang++"):
        if found := which(name):
            return Finding("compiler", Level.OK, found)
    detail = "no C++ compiler: native CPU kernels cannot be built, torch's own are used"
    return Finding("compiler", Level.WARNING, detail, "on Debian: apt-get install g++")


def check_port(host: str, port: int) -> Finding:
    """Whether the gateway could listen there; a gateway that already does is no problem."""
    if port == 0:
        return Finding("port", Level.OK, "any that is free will be taken")
    where = f"{host}:{port}"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return Finding("port", Level.OK, f"{where} is free")
    if _is_gateway(where):
        return Finding("port", Level.OK, f"a Millstream gateway already serves {where}")
    return Finding("port", Level.WARNING, f"{where}: {reason}", "name another: --port or MILLSTREAM_PORT (0: any)")


def _is_gateway(where: str) -> bool:
    import httpx

    try:
        answer = httpx.get(f"http://{where}/openapi.json", timeout=2.0, trust_env=False)
        return "/v1/jobs" in answer.json().get("paths", {})
    except (httpx.HTTPError, ValueError, AttributeError):
        return False
