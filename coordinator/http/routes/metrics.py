"""Metrics in the format of Prometheus: one table of instruments, read when a scrape asks.

Labels are the server's own words (states, reasons, outcomes, paths as they are routed) and the
names of the runs in the overview: nothing that a client could make up becomes a label. Counters and
histograms are of this process; gauges of tasks, workers and runs come from the overview.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from coordinator.accounts.server_identity import software
from coordinator.rules.health import AlertKind
from coordinator.traffic import Durations
from shared.errors import Unavailable

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from coordinator.rules.overview import Gauges, RunLine
    from coordinator.services import Coordinator

PREFIX = "coordinator_"
OTHER = "other"  # label for all runs that are not in the overview
FAILED, FAILED_HELP = "database_failed", "1 when nothing can be written any more."

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]
Sample = tuple[Labels, float]
_RUN = ("run",)
_ANY: tuple[Labels, ...] = ((),)
_STANDINGS = ("probation", "vetted", "suspended")


@dataclass(frozen=True, slots=True)
class Scrape:
    """Readings of one scrape: the services, and the gauges."""

    coordinator: Coordinator
    gauges: Gauges

    @property
    def named(self) -> set[str]:
        """Return the names of the runs in the overview, each of which is a label."""
        return {run.name for run in self.gauges.runs}

    def by_run(self, counts: Iterable[Sample]) -> Iterator[Sample]:
        """Yield counts whose first label is a run; the counts of runs that are not in the overview
        are summed under OTHER.
        """
        totals: defaultdict[Labels, float] = defaultdict(float)
        named = self.named
        for (run, *rest), count in counts:
            totals[run if run in named else OTHER, *rest] += count
        yield from totals.items()

    def runs(self, counts: Mapping[str, float]) -> Iterator[Sample]:
        """Yield counts by run, as `by_run` does."""
        return self.by_run(((run,), count) for run, count in counts.items())


Read = Callable[[Scrape], "Iterable[Sample] | Durations | float"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric: its name without the prefix, help text, reader, and labels."""

    kind: Kind
    name: str
    help: str
    read: Read
    labels: Labels = ()
    # Labels that have the value 0 from the first scrape on (for each run, where the first label is
    # the run): rate() and increase() do not count the first value of a series.
    zeroed: tuple[Labels, ...] = ()

    def samples(self, scrape: Scrape) -> Mapping[Labels, float]:
        """Return the values of a scrape, and 0 for zeroed labels without a count yet."""
        reading = self.read(scrape)
        if isinstance(reading, int | float):
            return {(): reading}
        runs = sorted(scrape.named) if self.labels[:1] == _RUN else None
        labels = self.zeroed if runs is None else [(r, *rest) for r in runs for rest in self.zeroed]
        return dict.fromkeys(labels, 0.0) | dict(reading)  # type: ignore[arg-type]


def _counter(name: str, help: str, read: Read, labels: Labels = (), *zeroed: Labels) -> Instrument:
    return Instrument("counter", name, help, read, labels, zeroed)


def _gauge(name: str, help: str, read: Read, labels: Labels = (), *zeroed: Labels) -> Instrument:
    return Instrument("gauge", name, help, read, labels, zeroed)


def _histogram(name: str, help: str, durations: Callable[[Coordinator], Durations]) -> Instrument:
    return Instrument("histogram", name, help, lambda scrape: durations(scrape.coordinator))


def _of_run(name: str, help: str, value: Callable[[RunLine], float | None]) -> Instrument:
    """Return a gauge with a value for each run; a run with None is left out."""

    def read(scrape: Scrape) -> Iterator[Sample]:
        for run in scrape.gauges.runs:
            if (figure := value(run)) is not None:
                yield (run.name,), figure

    return _gauge(name, help, read, _RUN)


def _by_state(name: str, help: str, *states: tuple[str, Callable[[RunLine], float]]) -> Instrument:
    """Return a gauge with a value for each run and state."""

    def read(scrape: Scrape) -> Iterator[Sample]:
        for run in scrape.gauges.runs:
            yield from (((run.name, state), value(run)) for state, value in states)

    return _gauge(name, help, read, ("run", "state"))


def _one_label(counts: Mapping[str, float]) -> Iterator[Sample]:
    """Yield counts as samples of a single label."""
    yield from (((label,), count) for label, count in counts.items())


def _certificate(scrape: Scrape) -> Iterator[Sample]:
    ends_at = scrape.coordinator.alerts.certificate_ends_at
    if ends_at is not None:
        yield (), ends_at


_REQUESTS = (
    _counter(
        "http_requests",
        "Requests answered.",
        lambda s: (
            ((method, path, str(status)), count)
            for (method, path, status), count in s.coordinator.traffic.requests.items()
        ),
        ("method", "path", "status"),
    ),
    _counter(
        "http_request_seconds",
        "Seconds spent on requests, waits of long polls included.",
        lambda s: s.coordinator.traffic.seconds.items(),
        ("method", "path"),
    ),
    _counter(
        "received_bytes", "Bytes of bodies received.", lambda s: s.coordinator.traffic.bytes_in
    ),
    _counter("sent_bytes", "Bytes of bodies sent.", lambda s: s.coordinator.traffic.bytes_out),
    _gauge(
        "page_viewers", "Browsers that watch a run live.", lambda s: s.coordinator.traffic.viewers
    ),
)

_QUEUE = (
    _by_state(
        "tasks",
        "Tasks that are not done, by run and state.",
        ("todo", lambda run: run.todo),
        ("doing", lambda run: run.doing),
        ("discarded", lambda run: run.failed),
    ),
    _gauge(
        "workers",
        "Machines of volunteers, by state.",
        lambda s: _one_label(s.gauges.workers),
        ("state",),
    ),
    _gauge(
        "accounts",
        "Active accounts, by standing.",
        lambda s: [((standing,), s.gauges.volunteers.get(standing, 0)) for standing in _STANDINGS],
        ("standing",),
    ),
    _histogram(
        "claim_seconds",
        "A transaction that gives leases, for all who asked at once.",
        lambda c: c.claims.durations,
    ),
    _counter("leases", "Leases given.", lambda s: s.runs(s.coordinator.claims.leases), _RUN, *_ANY),
    _counter(
        "leases_expired",
        "Leases whose worker was silent or too slow.",
        lambda s: s.coordinator.task_leases.expired,
    ),
    _counter(
        "leases_released",
        "Leases that workers gave back.",
        lambda s: _one_label(s.coordinator.task_leases.released),
        ("reason",),
        ("failed",),
        ("given back",),
    ),
    _histogram("heartbeat_seconds", "Answering a heartbeat.", lambda c: c.heartbeats.durations),
)

_CONTRIBUTIONS = (
    _histogram("submit_seconds", "A submission until its verdict.", lambda c: c.intake.durations),
    _counter(
        "contributions",
        "Contributions decided, by run, verdict and reason.",
        lambda s: s.by_run(s.coordinator.intake.decided.items()),
        ("run", "verdict", "reason"),
        ("accepted", ""),
        ("rejected", ""),
    ),
    _by_state(
        "contributions_waiting",
        "Contributions that wait for their check, or for a merge.",
        ("checking", lambda run: run.checking),
        ("accepted", lambda run: run.accepted),
    ),
    _histogram("merge_seconds", "A merge that made a version.", lambda c: c.merger.durations),
    _counter(
        "merges",
        "Merges, by run and outcome.",
        lambda s: s.by_run(s.coordinator.merger.outcomes.items()),
        ("run", "outcome"),
        ("merged",),
        ("overtaken",),
        ("failed",),
    ),
    _histogram(
        "evaluation_seconds", "An evaluation of a version.", lambda c: c.evaluation.durations
    ),
    _counter(
        "evaluations",
        "Evaluations, by run and outcome.",
        lambda s: s.by_run(s.coordinator.evaluation.outcomes.items()),
        ("run", "outcome"),
        ("done",),
        ("failed",),
    ),
)

_RUNS = (
    _gauge(
        "run_state",
        "1 for the state that a run is in.",
        lambda s: [((run.name, run.state), 1) for run in s.gauges.runs],
        ("run", "state"),
    ),
    _gauge(
        "run_standstill",
        "1 for the reason why an open run does not go on.",
        lambda s: [
            ((run.name, run.standstill.cause.value), 1) for run in s.gauges.runs if run.standstill
        ],
        ("run", "cause"),
    ),
    _of_run("run_version", "Newest version.", lambda run: run.version),
    _of_run(
        "run_version_timestamp_seconds",
        "When the newest version was made.",
        lambda run: run.head_at,
    ),
    _of_run("run_loss", "Newest measured loss.", lambda run: run.loss),
    _of_run("run_workers", "Machines with a task of the run in hand.", lambda run: run.workers),
    _of_run("run_tokens", "Tokens, pixels or moves merged.", lambda run: run.tokens),
    _of_run(
        "run_busy_ratio",
        "Share of the last day's time of its machines at training.",
        lambda run: None if run.time is None else run.time.busy,
    ),
    _of_run(
        "run_goodput_ratio",
        "Share of that time at training that was merged.",
        lambda run: None if run.time is None else run.time.goodput,
    ),
)

_CHECKS = (
    _counter(
        "computing_seconds",
        "Seconds of work of the processes besides the server.",
        lambda s: [((compute.name,), compute.busy_s) for compute in s.coordinator.computing],
        ("process",),
    ),
    _gauge(
        "recomputes_waiting",
        "Contributions that are being computed again.",
        lambda s: [((), s.gauges.backlog.waiting)],
    ),
    _gauge(
        "alerts",
        "Alerts whose cause lasts, by kind.",
        lambda s: _one_label(s.coordinator.alerts.standing()),
        ("kind",),
        *((kind,) for kind in get_args(AlertKind)),
    ),
)

_ANSWERS = (
    _counter(
        "answers_requests",
        "Prompts that were begun.",
        lambda s: s.runs(s.coordinator.answers.meter.requests),
        _RUN,
    ),
    _counter(
        "answers_tokens",
        "Tokens streamed or scored.",
        lambda s: s.runs(s.coordinator.answers.meter.tokens),
        _RUN,
    ),
    _histogram(
        "answers_first_token_seconds",
        "Time to the first token.",
        lambda c: c.answers.meter.first_token,
    ),
    _gauge("answers_waiting", "Requests under way.", lambda s: s.coordinator.answers.meter.running),
)

# Database, disk, and what the organiser has to renew.
_MACHINE = (
    _histogram("database_read_seconds", "A view of the database.", lambda c: c.db.reads),
    _histogram(
        "database_write_seconds",
        "A transaction, the wait for its turn included.",
        lambda c: c.db.writes,
    ),
    _gauge(FAILED, FAILED_HELP, lambda s: float(bool(s.coordinator.db.failed))),
    _gauge(
        "database_bytes",
        "Size of the database, without SQLite's journal.",
        lambda s: s.gauges.database.bytes,
    ),
    _gauge(
        "disk_free_bytes",
        "Free bytes on the fuller disk of data directory and blobs.",
        lambda s: s.coordinator.space.free_bytes(),
    ),
    _gauge(
        "disk_floor_bytes",
        "With less than that nothing new is accepted.",
        lambda s: s.coordinator.space.floor_bytes,
    ),
    _gauge(
        "read_only",
        "1 while nothing new is accepted.",
        lambda s: float(s.coordinator.space.read_only),
    ),
    _gauge(
        "backup_timestamp_seconds",
        "When the newest backup was made; 0: never.",
        lambda s: s.gauges.backup_at or 0.0,
    ),
    _gauge("certificate_end_timestamp_seconds", "When the TLS certificate ends.", _certificate),
    _gauge(
        "build_info",
        "1, with the version of the software.",
        lambda s: _one_label({software(): 1.0}),
        ("version",),
    ),
)

INSTRUMENTS: tuple[Instrument, ...] = (
    *_REQUESTS,
    *_QUEUE,
    *_CONTRIBUTIONS,
    *_RUNS,
    *_CHECKS,
    *_ANSWERS,
    *_MACHINE,
)


class _Collector:
    """Turns the values of a scrape into metric families."""

    def __init__(self, scrape: Scrape) -> None:
        self._scrape = scrape

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        for instrument in INSTRUMENTS:
            name = PREFIX + instrument.name
            if instrument.kind == "histogram":
                durations = instrument.read(self._scrape)
                assert isinstance(durations, Durations)
                histogram = HistogramMetricFamily(name, instrument.help, labels=instrument.labels)
                histogram.add_metric((), durations.buckets(), durations.total_s)
                yield histogram
                continue
            family = CounterMetricFamily if instrument.kind == "counter" else GaugeMetricFamily
            metric = family(name, instrument.help, labels=instrument.labels)
            for labels, value in instrument.samples(self._scrape).items():
                metric.add_metric(labels, value)
            yield metric


async def exposition(coordinator: Coordinator) -> tuple[str, bytes]:
    """Return content type and body; if the database has failed, the body says only that. Raises
    Unavailable if the database does not answer for another reason.
    """
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        Gauge,
        ProcessCollector,
        generate_latest,
    )

    registry = CollectorRegistry()
    try:
        registry.register(_Collector(Scrape(coordinator, await coordinator.overviews.gauges())))
    except Unavailable:
        if not coordinator.db.failed:
            raise
        Gauge(PREFIX + FAILED, FAILED_HELP, registry=registry).set(1.0)
    ProcessCollector(registry=registry)
    return CONTENT_TYPE_LATEST, generate_latest(registry)
