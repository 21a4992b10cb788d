"""How far the gateway's ETAs lie from what happens, under a steady and a bursty load, through real processes.

    python -m bench.eta [--output bench/results/eta.json] [--only NAME]

The model `fake` spends simulated time: 30 ms a step and 0.5 ms a token, eight sequences at once. Jobs differ in length.
Of each that waits, the ETA is read when it is submitted and once more while it waits, and compared with when its first
token came. Exit code 1 where the median error of a load is over 25%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.process import Process
from bench.machine import machine
from engine.config import EngineConfig
from infra.embedded import EmbeddedServer
from infra.ports import free_port
from infra.settings import GatewaySettings, StoreSettings, WorkerSettings
from millstream.environment import environment_of

BAR = 0.25
LEAST_WAIT_SECONDS = 0.2  # shorter waits are noise; they are counted, not measured
SEATS, STEP_SECONDS, TOKEN_SECONDS = 8, 0.03, 0.0005


@dataclass(frozen=True)
class Load:
    """When jobs come, and what they are."""

    bursts: list[tuple[float, int]]  # seconds after the start, jobs
    num_workers: int = 1
    eos_every: int = 0  # one token in so many ends the output; 0: outputs are as long as they may be
    tiers: tuple[str, ...] = ("standard",)


def steady(rate: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """Single jobs at random moments, `rate` a second."""
    chance, at, found = random.Random(seed), 0.0, list[tuple[float, int]]()
    while (at := at + chance.expovariate(rate)) < seconds:
        found.append((at, 1))
    return found


# Eight seats of jobs of 34 ms a token and 96 tokens on average give 2.4 jobs a second.
LOADS = {
    "steady": Load(steady(2.7, 60, seed=1)),
    "bursty": Load([(0.0, 40), (22.0, 30), (44.0, 50)]),
    "bursty, two workers": Load([(0.0, 60), (18.0, 40)], num_workers=2),
    "bursty, outputs that end at random": Load([(0.0, 40), (15.0, 40), (30.0, 40)], eos_every=60),
    "steady, two tiers": Load(steady(2.7, 45, seed=2), tiers=("interactive", "bulk")),
}


@dataclass
class Sample:
    """One ETA that a client was told."""

    job_id: str
    at: float  # Unix seconds
    position: int
    eta_seconds: float | None
    moment: str  # "submit" or "later"


@dataclass
class Site:
    """A gateway and workers with an embedded server."""

    folder: Path
    server: EmbeddedServer
    processes: list[Process] = field(default_factory=list)

    async def start(self, command: str, *settings: object) -> Process:
        store = StoreSettings(redis_url=self.server.url, blob_url=(self.folder / "blobs").absolute().as_uri())
        environment = environment_of(store, *settings, base=dict(os.environ))
        process = Process(command, environment, self.folder / f"{command}-{len(self.processes)}.log")
        self.processes.append(process)
        await process.start()
        return process


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Nothing of it is left afterwards."""
    with tempfile.TemporaryDirectory() as name:
        made = Site(Path(name), EmbeddedServer(Path(name) / "server"))
        made.server.start()
        try:
            yield made
        finally:
            for process in made.processes:
                process.end()
            made.server.stop()


async def measure(load: Load) -> list[tuple[Sample, float]]:
    """Samples, and the seconds that their jobs had still to wait for their first token."""
    port = free_port()
    engine = EngineConfig(
        max_num_seqs=SEATS, fake_seconds_per_step=STEP_SECONDS, fake_seconds_per_token=TOKEN_SECONDS,
        fake_eos_every=load.eos_every,
    )  # fmt: skip
    async with site() as made, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        await made.start("gateway", GatewaySettings(port=port))
        for _ in range(load.num_workers):
            await made.start("worker", WorkerSettings(model="fake"), engine)
        await warm_up(client, load)
        return await Run(client, load).samples()


async def warm_up(client: httpx.AsyncClient, load: Load) -> None:
    """A few jobs, so that something is measured, as on any day but the first."""
    chance = random.Random(0)
    for num in (1, 3 * SEATS * load.num_workers):
        jobs = [client.post("/v1/jobs", json=request(chance, load), headers={"Prefer": "wait=60"}) for _ in range(num)]
        for answer in await asyncio.gather(*jobs):
            assert answer.json()["status"] == "succeeded", answer.text
    await asyncio.sleep(6.0)  # until the worker has told its pace


def request(chance: random.Random, load: Load) -> dict[str, Any]:
    params = {"max_tokens": chance.randint(32, 160), "ignore_eos": not load.eos_every, "seed": chance.randrange(10**6)}
    text = "".join(chance.choice("abcdefgh ") for _ in range(chance.randint(50, 500)))
    return {"model": "fake", "input": text, "params": params, "tier": chance.choice(load.tiers)}


class Run:
    """Submits a load and asks about it."""

    def __init__(self, client: httpx.AsyncClient, load: Load) -> None:
        self.client = client
        self.load = load
        self.chance = random.Random(7)
        self.found: list[Sample] = []

    async def samples(self) -> list[tuple[Sample, float]]:
        started, asking = time.monotonic(), list[asyncio.Task[None]]()
        for at, num_jobs in self.load.bursts:
            await asyncio.sleep(max(0.0, started + at - time.monotonic()))
            asking += [asyncio.create_task(self._job()) for _ in range(num_jobs)]
        await asyncio.gather(*asking)
        first_tokens = {sample.job_id: await self._first_token_at(sample.job_id) for sample in self.found}
        return [(sample, first_tokens[sample.job_id] - sample.at) for sample in self.found]

    async def _job(self) -> None:
        job = await self._look("submit", self.client.post("/v1/jobs", json=request(self.chance, self.load)))
        await asyncio.sleep(self.chance.uniform(0.5, 12.0))
        await self._look("later", self.client.get(f"/v1/jobs/{job}"))
        while (await self.client.get(f"/v1/jobs/{job}?wait=60")).json()["status"] in ("queued", "running"):
            pass

    async def _look(self, moment: str, asked: Any) -> str:
        job = (await asked).json()
        if queue := job.get("queue"):
            self.found.append(Sample(job["id"], time.time(), queue["position"], queue["eta_seconds"], moment))
        return str(job["id"])

    async def _first_token_at(self, job_id: str) -> float:
        timeline = (await self.client.get(f"/v1/jobs/{job_id}/timeline")).json()
        return next(float(entry["at"]) for entry in timeline["entries"] if entry["what"] == "first_token")


def summary(samples: list[tuple[Sample, float]]) -> dict[str, Any]:
    """Errors relative to the wait that came, and how often none was told."""
    waits = [(sample, seconds) for sample, seconds in samples if seconds >= LEAST_WAIT_SECONDS]
    told = [(sample, sample.eta_seconds, seconds) for sample, seconds in waits if sample.eta_seconds is not None]
    errors = sorted(abs(eta - seconds) / seconds for _, eta, seconds in told)
    leanings = [(eta - seconds) / seconds for _, eta, seconds in told]
    return {
        "num_samples": len(errors),
        "num_too_short": len(samples) - len(waits),
        "num_untold": len(waits) - len(told),
        "median_wait_seconds": round(statistics.median(seconds for _, seconds in waits), 2),
        "longest_wait_seconds": round(max(seconds for _, seconds in waits), 2),
        "median_error": round(statistics.median(errors), 3),
        "p90_error": round(errors[int(0.9 * (len(errors) - 1))], 3),
        "median_leaning": round(statistics.median(leanings), 3),  # over 0: told too long
        "median_error_at_submit": round(
            statistics.median(abs(eta - s) / s for sample, eta, s in told if sample.moment == "submit"), 3
        ),
    }


async def run(names: list[str], details: Path | None) -> dict[str, Any]:
    found = {}
    for name in names:
        samples = await measure(LOADS[name])
        found[name] = summary(samples)
        print(f"{name:<40} {found[name]}", flush=True)
        if details:
            rows = [[s.moment, s.position, s.eta_seconds, round(wait, 3)] for s, wait in samples]
            details.with_suffix(f".{name.replace(' ', '-').replace(',', '')}.json").write_text(json.dumps(rows))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.eta", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench/results/eta.json"))
    parser.add_argument("--only", choices=LOADS, action="append")
    parser.add_argument("--details", type=Path, help="also write every sample, to files of this name")
    options = parser.parse_args()
    found = asyncio.run(run(options.only or list(LOADS), options.details))
    result = {"what": "error of eta_seconds over the wait that came", "bar": BAR, "loads": found, **machine()}
    if not options.only:
        options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0 if all(load["median_error"] <= BAR for load in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
