"""What streams and submits cost one gateway process, with the model `fake` behind it.

    python -m bench.streams [--idle 9900] [--active 100] [--output bench/results/streams.json]

Four parts, one after the other: the CPU of a submit; how long after the engine's own time a client has its first token
at low load; the commands that the store gets for each token of a full batch whose clients all listen; and many open
event streams, some of them active, with the memory of an idle one. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.chaos.process import Process
from bench.commands import counted
from bench.eta import Site, site
from bench.machine import machine
from engine.config import EngineConfig
from infra.contracts import ModelCard
from infra.jobs import RedisJobs
from infra.ports import free_port
from infra.settings import GatewaySettings, WorkerSettings

SUBMIT_BAR_MS, FIRST_EVENT_BAR_MS, COMMANDS_BAR = 0.5, 10.0, 0.05
NUM_SUBMITS, NUM_FIRST_EVENTS = 2000, 60
BATCH, BATCH_TOKENS, BATCH_STEP_SECONDS = 64, 512, 0.01
ACTIVE_TOKENS, STEP_SECONDS = 200, 0.1
IDLE_MODEL = "idle"  # its jobs wait: no worker serves it


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Client:
    """One connection, and as little work as possible: it shares the machine with what it measures."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[bytes, bytes]:
        """Sends a request; the headers of its answer, which is not read yet."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        if not status.split()[1].startswith(b"2"):
            raise RuntimeError(f"{method} {path}: {status.decode()}")
        return {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines if line)}

    async def json(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = await self.ask(method, path, body)
        found: dict[str, Any] = json.loads(await self.reader.readexactly(int(headers[b"content-length"])))
        return found

    async def until(self, mark: bytes) -> None:
        await self.reader.readuntil(mark)


def job(model: str, max_tokens: int) -> dict[str, Any]:
    return {"model": model, "input": "x" * 300, "params": {"max_tokens": max_tokens, "ignore_eos": True}}


async def submits(port: int, pid: int) -> dict[str, Any]:
    """CPU of the gateway for each submit, one after the other and eight at once."""
    found: dict[str, Any] = {}
    for at_once in (1, 8):

        async def submit(num: int) -> None:
            async with Client(port) as client:
                for _ in range(num):
                    await client.json("POST", "/v1/jobs", job(IDLE_MODEL, 64))

        before = cpu_seconds(pid)
        await asyncio.gather(*(submit(NUM_SUBMITS // at_once) for _ in range(at_once)))
        found[f"cpu_ms_{at_once}_at_once"] = round((cpu_seconds(pid) - before) / NUM_SUBMITS * 1000, 3)
    return found


async def first_events(port: int) -> dict[str, Any]:
    """From submit to the client's first token, beyond what the engine took for it."""
    extra = []
    for _ in range(NUM_FIRST_EVENTS):
        async with Client(port) as client:
            began = time.perf_counter()
            job_id = (await client.json("POST", "/v1/jobs", job("fake", 4)))["id"]
            await client.ask("GET", f"/v1/jobs/{job_id}/events")
            await client.until(b"event: job.delta\n")
            seconds = time.perf_counter() - began
        async with Client(port) as client:
            await client.json("GET", f"/v1/jobs/{job_id}?wait=10")
            engine = (await client.json("GET", f"/v1/jobs/{job_id}/timeline"))["engine"]
        extra.append((seconds - engine["prefill_seconds"]) * 1000)
        await asyncio.sleep(0.05)
    return {"median_ms": round(statistics.median(extra), 2), "p90_ms": round(sorted(extra)[int(len(extra) * 0.9)], 2)}


async def commands(port: int, redis_url: str) -> dict[str, Any]:
    """What the store gets for each token of a full batch, from the submits to the last events."""

    async def follow() -> None:
        async with Client(port) as client:
            job_id = (await client.json("POST", "/v1/jobs", job("fake", BATCH_TOKENS)))["id"]
            await client.ask("GET", f"/v1/jobs/{job_id}/events")
            await client.until(b"event: job.succeeded\n")

    async with counted(redis_url) as counts:
        await asyncio.gather(*(follow() for _ in range(BATCH)))
    found = {"batch": BATCH, "tokens_each": BATCH_TOKENS, "per_token": round(counts.total() / BATCH / BATCH_TOKENS, 4)}
    return {**found, "by_name": dict(counts.most_common(8))}


async def many_streams(port: int, pid: int, num_idle: int, num_active: int) -> dict[str, Any]:
    before = resident_bytes(pid)
    slots = asyncio.Semaphore(64)
    clients: list[Client] = []

    async def open_stream(model: str, max_tokens: int) -> Client:
        async with slots:
            client = Client(port)
            await client.__aenter__()
            clients.append(client)
            job_id = (await client.json("POST", "/v1/jobs", job(model, max_tokens)))["id"]
            await client.ask("GET", f"/v1/jobs/{job_id}/events")
            await client.until(b"event: job.queued\n")
            return client

    async def drain(client: Client) -> None:
        while await client.reader.read(65536):
            pass

    began = time.perf_counter()
    idle = await asyncio.gather(*(open_stream(IDLE_MODEL, 64) for _ in range(num_idle)))
    opening_seconds = time.perf_counter() - began
    draining = [asyncio.create_task(drain(client)) for client in idle]  # comment lines of silent streams
    await asyncio.sleep(2.0)
    each = (resident_bytes(pid) - before) / max(1, num_idle)
    cpu, began = cpu_seconds(pid), time.perf_counter()
    await asyncio.sleep(20.0)
    idle_share = (cpu_seconds(pid) - cpu) / (time.perf_counter() - began)

    cpu, began = cpu_seconds(pid), time.perf_counter()

    async def follow() -> None:
        client = await open_stream("fake", ACTIVE_TOKENS)
        async with asyncio.timeout(300):
            await client.until(b"event: job.succeeded\n")

    await asyncio.gather(*(follow() for _ in range(num_active)))
    seconds = time.perf_counter() - began
    active_share = (cpu_seconds(pid) - cpu) / seconds
    for task in draining:
        task.cancel()
    for client in clients:
        client.writer.close()
    return {
        "num_idle": num_idle,
        "num_active": num_active,
        "idle_stream_kib": round(each / 1024, 1),
        "opening_seconds": round(opening_seconds, 1),
        "cpu_share_all_idle": round(idle_share, 3),
        "cpu_share_with_active": round(active_share, 3),
        "active_tokens_per_s": round(num_active * ACTIVE_TOKENS / seconds),
    }


async def run(num_idle: int, num_active: int) -> dict[str, Any]:
    port = free_port()
    async with site() as made:
        await card_without_worker(made)
        gateway: Process = await made.start("gateway", GatewaySettings(port=port))
        worker = await made.start("worker", WorkerSettings(model="fake"), EngineConfig(max_num_seqs=8))
        found: dict[str, Any] = {"submit": await submits(port, gateway.pid)}
        print(found["submit"], flush=True)
        found["first_event_over_engine"] = await first_events(port)
        print(found["first_event_over_engine"], flush=True)
        await worker.stop()
        batch = EngineConfig(max_num_seqs=BATCH, fake_seconds_per_step=BATCH_STEP_SECONDS)
        worker = await made.start("worker", WorkerSettings(model="fake"), batch)
        found["commands"] = await commands(port, made.server.url)
        print(found["commands"], flush=True)
        await worker.stop()
        engine = EngineConfig(max_num_seqs=max(1, num_active), fake_seconds_per_step=STEP_SECONDS)
        await made.start("worker", WorkerSettings(model="fake"), engine)
        found["streams"] = await many_streams(port, gateway.pid, num_idle, num_active)
        print(found["streams"], flush=True)
        return found


async def card_without_worker(made: Site) -> None:
    store = await RedisJobs.connect(made.server.url)
    card = ModelCard(
        alias=IDLE_MODEL, max_model_len=4096, vocab_size=260, tokenizer_digest="none", tokenizer_blob="none",
        weights_digest="none", profile="none", prefill_tokens_per_s=1000.0, decode_tokens_per_s=100.0,
    )  # fmt: skip
    await store.put_card(card)
    await store.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.streams", description=__doc__)
    parser.add_argument("--idle", type=int, default=9900)
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("bench/results/streams.json"))
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = asyncio.run(run(options.idle, options.active))
    bars = {
        "submit_cpu_ms": SUBMIT_BAR_MS,
        "first_event_ms": FIRST_EVENT_BAR_MS,
        "commands_per_token": COMMANDS_BAR,
    }
    result = {"what": "one gateway process", "bars": bars, **found, **machine()}
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    is_cheap = max(found["submit"].values()) <= SUBMIT_BAR_MS and found["commands"]["per_token"] <= COMMANDS_BAR
    return 0 if is_cheap and found["first_event_over_engine"]["median_ms"] <= FIRST_EVENT_BAR_MS else 1


if __name__ == "__main__":
    sys.exit(main())
