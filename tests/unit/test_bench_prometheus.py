"""Prometheus' text format as bench reads it."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bench import prometheus


def test_what_the_library_writes_for_vllm() -> None:
    """Two engines, as with data parallelism, and a model whose name needs escapes."""
    registry = CollectorRegistry()
    name = 'a "model" {of\nmine}'
    labels = ("model_name", "engine")
    tokens = Counter("vllm:generation_tokens", "Number of tokens.", labels, registry=registry)
    running = Gauge("vllm:num_requests_running", "Number of requests.", labels, registry=registry)
    waits = Histogram("vllm:request_queue_time_seconds", "Time.", labels, buckets=(0.3, 0.5), registry=registry)
    for engine, count in (("0", 3e9), ("1", 4)):
        tokens.labels(name, engine).inc(count)
        running.labels(name, engine).set(2)
        for seconds in (0.1, 0.4, 9):
            waits.labels(name, engine).observe(seconds)
    page = generate_latest(registry).decode()
    assert prometheus.total(page, "vllm:generation_tokens_total") == 3e9 + 4
    assert prometheus.total(page, "vllm:generation_tokens", "vllm:generation_tokens_total") == 3e9 + 4
    assert prometheus.total(page, "vllm:num_requests_running") == 4
    assert prometheus.buckets(page, "vllm:request_queue_time_seconds") == {0.3: 2, 0.5: 4, math.inf: 6}
    assert {sample.labels["model_name"] for sample in prometheus.samples(page, "vllm:num_requests_running")} == {name}


def test_a_name_is_not_its_beginning() -> None:
    page = 'vllm:prompt_tokens_total{engine="0"} 5.0\nvllm:prompt_tokens_recomputed_total 7\n'
    assert prometheus.total(page, "vllm:prompt_tokens_total") == 5
    assert prometheus.total(page, "vllm:prompt_tokens") is None
    assert prometheus.buckets(page, "vllm:prompt_tokens_total") is None


@pytest.mark.parametrize("page", ["", "<html>no such page</html>", '{"detail": "Not Found"}', "# a comment alone\n"])
def test_a_page_without_it_tells_nothing(page: str) -> None:
    assert prometheus.total(page, "vllm:generation_tokens_total") is None
    assert prometheus.buckets(page, "vllm:request_queue_time_seconds") is None
