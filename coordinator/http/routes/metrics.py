"""Counts and gauges in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from coordinator.services import Coordinator
    from coordinator.traffic import Traffic

# name -> run ("" where it is of no run) -> value
Gauges = Mapping[str, Mapping[str, float]]


async def gauges(coordinator: Coordinator) -> Gauges:
    """Return the figures of the moment, by name and run ("" = of no run)."""
    found: dict[str, dict[str, float]] = {
        "read_only": {"": float(coordinator.space.read_only)},
        "disk_free_bytes": {"": float(coordinator.space.free_bytes())},
        "run_version": {},
        "run_workers": {},
        "run_loss": {},
        "run_global_steps": {},
    }
    # Of checks and recomputes: the cost of trust, beside `train_s` of what they check.
    found |= {f"{each.name}_seconds": {"": each.busy_s} for each in coordinator.computing}
    meter = coordinator.answers.meter
    found["answers_waiting"] = {"": float(meter.waiting)}
    found["answers_requests"] = {run: float(count) for run, count in meter.requests.items()}
    found["answers_tokens"] = {run: float(count) for run, count in meter.tokens.items()}
    found["answers_first_token_seconds"] = {run: float(s) for run, s in meter.first_s.items()}
    found["answers_first_tokens"] = {run: float(count) for run, count in meter.firsts.items()}
    streams = coordinator.answers.streams  # the built-in engine writes 16 of a version at once
    found["answers_streams_writing"] = {"": float(streams.writing)}
    found["answers_streams_queued"] = {"": float(streams.queued)}
    for run in await coordinator.server.runs():
        found["run_version"][run.name] = run.version
        found["run_workers"][run.name] = run.workers
        found["run_global_steps"][run.name] = run.steps
        if run.loss is not None:
            found["run_loss"][run.name] = run.loss
    return found


class _Collector:
    """Turns plain numbers into metric families when Prometheus polls."""

    def __init__(self, traffic: Traffic, gauges: Gauges) -> None:
        self._traffic = traffic
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["method", "path", "status"]
        requests = CounterMetricFamily("http_requests", "Requests answered.", labels=labels)
        for (method, path, status), count in self._traffic.requests.items():
            requests.add_metric([method, path, str(status)], count)
        yield requests
        seconds = CounterMetricFamily(
            "http_request_seconds", "Time spent on them.", labels=labels[:2]
        )
        for (method, path), total in self._traffic.seconds.items():
            seconds.add_metric([method, path], total)
        yield seconds
        yield CounterMetricFamily(
            "received_bytes", "Bytes of bodies received.", self._traffic.bytes_in
        )
        yield CounterMetricFamily("sent_bytes", "Bytes of bodies sent.", self._traffic.bytes_out)
        for name, values in self._gauges.items():
            family = GaugeMetricFamily(
                name, name.replace("_", " ").capitalize() + ".", labels=["run"]
            )
            for run, value in values.items():
                family.add_metric([run], value)
            yield family


def exposition(traffic: Traffic, gauges: Gauges) -> tuple[str, bytes]:
    """Return content type and body of GET /metrics."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(traffic, gauges))
    return CONTENT_TYPE_LATEST, generate_latest(registry)
