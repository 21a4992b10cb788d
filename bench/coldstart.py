"""From a worker's process start to the first token that it serves, and where the time goes.

    python -m bench.coldstart [--model smollm2-135m] [--dtype auto] [--runs 5] [--output FILE]

A job waits in an embedded server; then `millstream worker` starts. The stages end with what the worker itself says, and
with the first token in the job's event log. The weights are in the file system's cache, as after an earlier start.
Prints each stage's median, writes bench/results/coldstart-<date>.json; exit code 1 where the whole takes over 3 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.machine import machine
from engine.config import EngineConfig
from infra.contracts import JobSpec, Kind, NewJob
from infra.embedded import EmbeddedServer
from infra.jobs import RedisJobs
from infra.keys import new_job_id
from infra.settings import StoreSettings, WorkerSettings
from millstream.environment import environment_of
from millstream.tether import VARIABLE as TETHER

BAR_SECONDS = 3.0
LONGEST_SECONDS = 120.0
RESULTS = Path(__file__).parent / "results"

STAGES = {  # what a line of the worker's output says -> the stage that it ends
    "starting to serve": "interpreter, settings, the worker's imports",
    "loading": "store, torch's import",
    "its weights are ready": "weights: mapped or packed",
    "loaded": "tokenizer",
    "worker ready": "KV pool, card, lane",
}
FIRST_TOKEN = "claim, first forward, publish"


async def one_start(url: str, settings: WorkerSettings, engine: EngineConfig, folder: Path) -> dict[str, float]:
    """Seconds of each stage of one start; the worker is ended afterwards."""
    store = await RedisJobs.connect(url)
    alias = settings.model
    lane = await store.open_lane(alias)
    params = {"max_tokens": 1, "temperature": 0.0}
    spec = JobSpec(model=alias, kind=Kind.GENERATE, prompt="The mill stands by the stream.", params=params)
    job = NewJob(id=new_job_id(lane), spec=spec, cost_tokens=64)
    await store.submit(job)
    kept = StoreSettings(redis_url=url, blob_url=f"file://{folder}")
    environment = environment_of(kept, settings, engine, base=os.environ)
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millstream", "worker"),
        env={**environment, TETHER: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    seen: dict[str, float] = {}
    output: list[str] = []

    async def listen() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            output.append(line.decode())
            for mark, stage in STAGES.items():
                if re.match(rf"(INFO [\w.]+: )?{mark}\b", output[-1]):
                    seen.setdefault(stage, time.perf_counter() - began)

    listening = asyncio.create_task(listen())
    try:
        async with asyncio.timeout(LONGEST_SECONDS):
            while not any(event.type == "job.delta" or event.is_last for event in await store.events(job.id)):
                if process.returncode is not None:
                    raise RuntimeError(f"the worker ended:\n{''.join(output)}")
                await asyncio.sleep(0.005)
        seen[FIRST_TOKEN] = time.perf_counter() - began
    finally:
        process.terminate()
        await process.wait()
        await listening
        await store.close()
    return durations(seen)


def durations(seen: dict[str, float]) -> dict[str, float]:
    """From the moments at which stages ended to what each took."""
    order = [*STAGES.values(), FIRST_TOKEN]
    if missing := [stage for stage in order if stage not in seen]:
        raise RuntimeError(f"the worker never said that these ended: {', '.join(missing)}")
    moments = [0.0, *(seen[stage] for stage in order)]
    return {stage: end - start for stage, start, end in zip(order, moments, moments[1:], strict=False)}


async def measure(model: str, dtype: str, num_runs: int) -> list[dict[str, float]]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with EmbeddedServer(folder / "server") as url:
            settings = WorkerSettings(model=model)
            engine = EngineConfig(dtype=dtype)  # type: ignore[arg-type]
            for _ in range(num_runs):
                found.append(await one_start(url, settings, engine, folder / "blobs"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.coldstart", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="file; bench/results/coldstart-<date>.json")
    options = parser.parse_args()
    runs = asyncio.run(measure(options.model, options.dtype, options.runs))
    totals = [sum(run.values()) for run in runs]
    stages = {stage: round(statistics.median(run[stage] for run in runs), 3) for stage in runs[0]}
    for stage, seconds in stages.items():
        print(f"{stage:<48} {seconds:6.2f} s")
    total = statistics.median(totals)
    print(f"{'process start to first token, median':<48} {total:6.2f} s   (bar {BAR_SECONDS} s)")
    report: dict[str, Any] = {
        "what": "seconds from a worker's process start to its first token",
        "machine": machine(),
        "model": options.model,
        "dtype": options.dtype,
        "stages": stages,
        "totals": [round(seconds, 3) for seconds in totals],
        "total_median": round(total, 3),
        "bar": BAR_SECONDS,
    }
    output = options.output or RESULTS / f"coldstart-{report['machine']['date']}.json"
    output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if total <= BAR_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
