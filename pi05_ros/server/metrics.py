"""/metrics: what Prometheus reads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pi05_ros.policy import ActionChunk, Observation
from pi05_ros.server.errors import RequestError
from pi05_ros.server.host import STAGES, PolicyHost

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0, 30.0)


class Metrics:
    """Of one server; a registry of its own, so that two servers in a process do not share numbers."""

    def __init__(self, host: PolicyHost) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "pi05_requests_total", "Requests by route and status.", ["route", "status"], registry=self._registry
        )
        self._request_seconds = Histogram(
            "pi05_request_seconds",
            "Request read to reply ready to send, by route.",
            ["route"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._stage_seconds = Histogram(
            "pi05_stage_seconds",
            "Stages of answered inferences, a robot's own too.",
            ["stage"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self.connections = Gauge(
            "pi05_connections", "Open websockets and HTTP requests, by kind.", ["kind"], registry=self._registry
        )
        self._registry.register(_HostCollector(host))
        host.watch(self._on_end)

    def count(self, route: str, status: int, began: float) -> None:
        """A request has ended. began: time.monotonic()."""
        self._requests.labels(route, str(status)).inc()
        self._request_seconds.labels(route).observe(time.monotonic() - began)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _on_end(self, _: Observation, future: Future[ActionChunk]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        for stage, milliseconds in future.result().timings.items():
            self._stage_seconds.labels(stage.removesuffix("_ms")).observe(milliseconds / 1e3)


class _HostCollector(Collector):
    """The engine's own counters, read when somebody asks."""

    def __init__(self, host: PolicyHost) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        stage = GaugeMetricFamily("pi05_stage", "1 for what the server is at.", labels=["stage"])
        for name in STAGES:
            stage.add_metric([name], float(name == self._host.stage))
        yield stage
        try:
            engine = self._host.policy().engine
        except RequestError:
            return
        stats = engine.stats()
        ends = CounterMetricFamily("pi05_inferences", "Requests to the engine, by how they ended.", labels=["end"])
        for end in ("answered", "failed", "cancelled"):
            ends.add_metric([end], stats[end])
        for reason, number in stats["refused"].items():
            ends.add_metric([f"refused_{reason}"], number)
        yield ends
        yield GaugeMetricFamily("pi05_queue_depth", "Requests that wait for the engine.", stats["waiting"])
        yield GaugeMetricFamily("pi05_running", "Requests in the batch that runs.", stats["running"])
        batches = CounterMetricFamily("pi05_batches", "Batches run, by size.", labels=["size"])
        for size, number in stats["batches"].items():
            batches.add_metric([str(size)], number)
        yield batches
        cache = CounterMetricFamily("pi05_prefix_cache", "Look-ups in the prefix cache.", labels=["result"])
        cache.add_metric(["hit"], stats["cache"]["hits"])
        cache.add_metric(["miss"], stats["cache"]["misses"])
        yield cache
        yield GaugeMetricFamily("pi05_prefix_cache_entries", "Prefixes kept.", stats["cache"]["entries"])
        yield GaugeMetricFamily("pi05_prefix_cache_bytes", "Memory that they take.", stats["cache"]["bytes"])
        if engine.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(engine.device)
            yield GaugeMetricFamily("pi05_device_memory_bytes", "Allocated on the device.", allocated)
            peak = torch.cuda.max_memory_allocated(engine.device)
            yield GaugeMetricFamily("pi05_device_memory_peak_bytes", "The most of it so far.", peak)
