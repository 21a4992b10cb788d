import socket
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine import LLM
from infra.ports import free_port
from tests.worker.worker_aids import ENGINE, SETTINGS, Backend, serving, submit, the_end, until, until_running
from worker.metrics import Metrics, MetricsPortTaken


def scraped(text: str) -> dict[str, float]:
    """Samples by name, with the labels that tell one from another."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "le")}
            assert sample.labels["model_name"] == "fake"
            samples[sample.name + "".join(f"|{value}" for value in labels.values())] = sample.value
    return samples


async def test_figures_are_served_and_add_up(backend: Backend) -> None:
    port = free_port()
    async with serving(backend, settings=replace(SETTINGS, metrics_port=port)) as running:
        ended = [await submit(backend.store, "canary prompt", max_tokens=30, n=2) for _ in range(3)]
        for job_id in ended:
            await the_end(backend.store, job_id)
        failed = await submit(backend.store, "x", temperature=-1.0)
        await the_end(backend.store, failed)
        cancelled = await submit(backend.store, "x", max_tokens=5000)
        await until_running(backend, cancelled)
        await backend.store.cancel(cancelled)
        await until(lambda: not running.bridge.attempts and running.worker.stats.num_requests == 0)
        async with httpx.AsyncClient(trust_env=False) as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = scraped(text)
    assert samples["millstream_jobs_total|succeeded"] == 3
    assert samples["millstream_jobs_total|failed"] == 1
    assert samples["millstream_fenced_writes_total"] == 1
    assert samples["millstream_request_success_total|length"] == 6
    assert samples["millstream_time_to_first_token_seconds_count"] == 4
    assert samples["millstream_e2e_request_latency_seconds_count"] == 4
    assert samples["millstream_request_queue_time_seconds_count"] == 5
    assert samples["millstream_generation_tokens_total"] >= 180
    assert samples["millstream_prefix_cache_queries_total"] >= samples["millstream_prefix_cache_hits_total"]
    assert samples["millstream_num_requests_running"] == samples["millstream_kv_cache_usage_perc"] == 0
    assert samples["millstream_num_preemptions_total|recompute"] == 0
    assert "canary" not in text
    for name in ("num_requests_waiting", "num_requests_swapped", "kv_waste_perc", "batch_occupancy"):
        assert f"millstream_{name}" in samples
    for name in ("inter_token_latency", "request_prefill_time", "request_decode_time", "step"):
        assert samples[f"millstream_{name}_seconds_count"] > 0


def test_a_port_that_is_taken_is_said_so() -> None:
    llm = LLM("fake", ENGINE)
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        with (
            pytest.raises(MetricsPortTaken, match="--metrics-port"),
            Metrics("a", llm.stats).served(other.getsockname()[1]),
        ):
            pass
