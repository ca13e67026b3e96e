"""Metrics in the format of Prometheus: one table of instruments, read when a scrape asks.

Labels are the server's own words (states, reasons, outcomes, paths as they are routed) and names of
runs, of which `RUNS_MAX` are named: nothing that a client could make up becomes a label. Counters
and histograms are of this process, gauges of tasks, workers and runs of the whole installation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from coordinator.accounts.server_identity import software
from coordinator.database.engine.open_database import file_of
from coordinator.database.monitoring.gauges import Gauge
from coordinator.traffic import Durations
from coordinator.upkeep.alert_conditions import Kind as AlertKind

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from coordinator.services import Coordinator

PREFIX = "coordinator_"
OTHER = "other"  # stands for all runs that are not named

Kind = Literal["counter", "gauge", "histogram"]
Sample = tuple[tuple[str, ...], float]
_RUN = ("run",)
_ANY: tuple[tuple[str, ...], ...] = ((),)
Read = Callable[["Scrape"], "Iterable[Sample] | Durations"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric: its name without the prefix, help text, labels, and reader."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...]
    read: Read
    # Labels that have the value 0 from the first scrape on (for each run, where the first label is
    # the run): rate() and increase() miss the first count of a series that starts with it.
    known: tuple[tuple[str, ...], ...] = ()

    def samples(self, scrape: Scrape) -> Mapping[tuple[str, ...], float]:
        """Return the values of a scrape, and 0 for known labels without a count yet."""
        runs = sorted(scrape.named) if self.labels[:1] == _RUN else None
        known = self.known if runs is None else [(r, *rest) for r in runs for rest in self.known]
        return dict.fromkeys(known, 0.0) | dict(self.read(scrape))  # type: ignore[arg-type]


class Scrape:
    """Readings of one scrape: the services, and the gauges of the database by their name."""

    def __init__(self, coordinator: Coordinator, read: Iterable[Gauge]) -> None:
        self.coordinator = coordinator
        self._gauges: dict[str, list[Gauge]] = {}
        for gauge in read:
            self._gauges.setdefault(gauge.name, []).append(gauge)
        self.named = {gauge.run for gauge in self._gauges.get("run_version", ())}

    def of(self, name: str) -> list[Gauge]:
        """Return the gauges of a name."""
        return self._gauges.get(name, [])

    def by_run(self, counts: Iterable[Sample]) -> Iterator[Sample]:
        """Yield counts whose first label is a run; unnamed runs are summed as one."""
        found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for (run, *rest), count in counts:
            found[run if run in self.named else OTHER, *rest] += count
        yield from found.items()

    def runs(self, counts: Mapping[str, float]) -> Iterator[Sample]:
        """Return counts by run."""
        return self.by_run(((run,), count) for run, count in counts.items())


def _stored(name: str, *, run: bool = False, label: bool = False) -> Read:
    """Read the gauges of a name from the database, with the labels that they have."""

    def read(scrape: Scrape) -> Iterator[Sample]:
        for gauge in scrape.of(name):
            labels = ((gauge.run,) if run else ()) + ((gauge.label,) if label else ())
            yield labels, gauge.value

    return read


def _one(value: Callable[[Coordinator], float]) -> Read:
    """Read one number of the services."""
    return lambda scrape: [((), value(scrape.coordinator))]


def _timed(durations: Callable[[Coordinator], Durations]) -> Read:
    return lambda scrape: durations(scrape.coordinator)


def _requests(scrape: Scrape) -> Iterator[Sample]:
    for (method, path, status), count in scrape.coordinator.traffic.requests.items():
        yield (method, path, str(status)), count


def _backup(scrape: Scrape) -> Iterator[Sample]:
    yield (), max((float(gauge.label) for gauge in scrape.of("backup")), default=0.0)


def _database_bytes(scrape: Scrape) -> Iterator[Sample]:
    file = file_of(scrape.coordinator.settings.database_url)
    if file is not None:
        parts = (file, file.with_name(f"{file.name}-wal"))
        yield (), float(sum(part.stat().st_size for part in parts if part.exists()))


def _certificate(scrape: Scrape) -> Iterator[Sample]:
    ends_at = scrape.coordinator.alerts.certificate_ends_at
    if ends_at is not None:
        yield (), ends_at


# One row an instrument, by subject.
INSTRUMENTS: tuple[Instrument, ...] = (
    # requests
    Instrument(
        "counter",
        "http_requests",
        "Requests answered.",
        ("method", "path", "status"),
        _requests,
    ),
    Instrument(
        "counter",
        "http_request_seconds",
        "Time spent on them, the wait of a long poll included.",
        ("method", "path"),
        lambda s: s.coordinator.traffic.seconds.items(),
    ),
    Instrument(
        "counter",
        "received_bytes",
        "Bytes of bodies received.",
        (),
        _one(lambda c: c.traffic.bytes_in),
    ),
    Instrument(
        "counter", "sent_bytes", "Bytes of bodies sent.", (), _one(lambda c: c.traffic.bytes_out)
    ),
    Instrument(
        "gauge",
        "page_viewers",
        "Browsers that watch a run live.",
        (),
        _one(lambda c: c.traffic.viewers),
    ),
    # the queue
    Instrument(
        "gauge",
        "tasks",
        "Tasks that are not done, by run and state.",
        ("run", "state"),
        _stored("tasks", run=True, label=True),
    ),
    Instrument(
        "gauge",
        "workers",
        "Machines of volunteers, by state.",
        ("state",),
        _stored("workers", label=True),
    ),
    Instrument(
        "gauge",
        "accounts",
        "Active accounts, by standing.",
        ("standing",),
        _stored("accounts", label=True),
        (("probation",), ("vetted",), ("suspended",)),
    ),
    Instrument(
        "histogram",
        "claim_seconds",
        "A transaction that gives leases, for all who asked at once.",
        (),
        _timed(lambda c: c.claims.durations),
    ),
    Instrument(
        "counter",
        "leases",
        "Leases given.",
        _RUN,
        lambda s: s.runs(s.coordinator.claims.leases),
        _ANY,
    ),
    Instrument(
        "counter",
        "leases_expired",
        "Leases whose worker was silent or too slow.",
        (),
        _one(lambda c: c.queue.expired),
    ),
    Instrument(
        "counter",
        "leases_released",
        "Leases that workers gave back.",
        ("reason",),
        lambda s: [((why,), n) for why, n in s.coordinator.queue.released.items()],
        (("failed",), ("given back",)),
    ),
    Instrument(
        "histogram",
        "heartbeat_seconds",
        "Answering a heartbeat.",
        (),
        _timed(lambda c: c.heartbeats.durations),
    ),
    # contributions
    Instrument(
        "histogram",
        "upload_seconds",
        "A request that brought bytes of an upload.",
        (),
        _timed(lambda c: c.uploads.durations),
    ),
    Instrument(
        "histogram",
        "submit_seconds",
        "A submission until its verdict.",
        (),
        _timed(lambda c: c.intake.durations),
    ),
    Instrument(
        "counter",
        "contributions",
        "Contributions decided, by run, verdict and reason.",
        ("run", "verdict", "reason"),
        lambda s: s.by_run(s.coordinator.intake.decided.items()),
        (("accepted", ""), ("rejected", "")),
    ),
    Instrument(
        "gauge",
        "contributions_waiting",
        "Contributions that wait for their check, or for a merge.",
        ("run", "state"),
        _stored("contributions_waiting", run=True, label=True),
        (("checking",), ("accepted",)),
    ),
    # merges and evaluations
    Instrument(
        "histogram",
        "merge_seconds",
        "A merge that made a version.",
        (),
        _timed(lambda c: c.merger.durations),
    ),
    Instrument(
        "counter",
        "merges",
        "Merges, by run and outcome.",
        ("run", "outcome"),
        lambda s: s.by_run(s.coordinator.merger.outcomes.items()),
        (("merged",), ("overtaken",), ("failed",)),
    ),
    Instrument(
        "counter",
        "contributions_merged",
        "Contributions merged.",
        _RUN,
        lambda s: s.runs(s.coordinator.merger.merged),
        _ANY,
    ),
    Instrument(
        "histogram",
        "evaluation_seconds",
        "An evaluation of a version.",
        (),
        _timed(lambda c: c.evaluation.durations),
    ),
    Instrument(
        "counter",
        "evaluations",
        "Evaluations, by run and outcome.",
        ("run", "outcome"),
        lambda s: s.by_run(s.coordinator.evaluation.outcomes.items()),
        (("done",), ("failed",)),
    ),
    Instrument(
        "gauge",
        "evaluations_waiting",
        "Versions that wait for their evaluation.",
        (),
        _stored("evaluations_waiting"),
    ),
    # runs
    Instrument(
        "gauge",
        "run_state",
        "1 for the state that a run is in.",
        ("run", "state"),
        _stored("run_state", run=True, label=True),
    ),
    Instrument("gauge", "run_version", "Newest version.", _RUN, _stored("run_version", run=True)),
    Instrument(
        "gauge",
        "run_version_timestamp_seconds",
        "When the newest version was made.",
        _RUN,
        _stored("run_version_at", run=True),
    ),
    Instrument("gauge", "run_loss", "Newest measured loss.", _RUN, _stored("run_loss", run=True)),
    Instrument(
        "gauge",
        "run_workers",
        "Machines with a task of the run in hand.",
        _RUN,
        _stored("run_workers", run=True),
        _ANY,
    ),
    Instrument(
        "gauge",
        "run_steps",
        "Steps merged; a rollback takes back.",
        _RUN,
        _stored("run_steps", run=True),
    ),
    Instrument(
        "gauge",
        "run_tokens",
        "Tokens, pixels or moves merged.",
        _RUN,
        _stored("run_tokens", run=True),
    ),
    # checks of work
    Instrument(
        "counter",
        "computing_seconds",
        "Work of the processes beside the server.",
        ("process",),
        lambda s: [((each.name,), each.busy_s) for each in s.coordinator.computing],
    ),
    Instrument(
        "counter",
        "audits_seconds",
        "Work of volunteers on audits that was paid.",
        (),
        lambda s: [((), s.coordinator.audits.seconds)],
    ),
    Instrument(
        "gauge",
        "audits_waiting",
        "Audits by volunteers that are not settled.",
        ("state",),
        _stored("audits_waiting", label=True),
    ),
    Instrument(
        "gauge",
        "recomputes_waiting",
        "Contributions that are being computed again.",
        ("state",),
        _stored("recomputes_waiting", label=True),
    ),
    Instrument(
        "gauge",
        "alerts",
        "Alerts that stand, by kind.",
        ("kind",),
        lambda s: [((kind,), n) for kind, n in s.coordinator.alerts.standing().items()],
        tuple((kind,) for kind in get_args(AlertKind)),
    ),
    # answers
    Instrument(
        "counter",
        "answers_requests",
        "Prompts that were begun.",
        _RUN,
        lambda s: s.runs(s.coordinator.answers.meter.requests),
    ),
    Instrument(
        "counter",
        "answers_tokens",
        "Tokens streamed.",
        _RUN,
        lambda s: s.runs(s.coordinator.answers.meter.tokens),
    ),
    Instrument(
        "histogram",
        "answers_first_token_seconds",
        "Time to the first token.",
        (),
        _timed(lambda c: c.answers.meter.first_token),
    ),
    Instrument(
        "gauge",
        "answers_waiting",
        "Requests under way.",
        (),
        _one(lambda c: c.answers.meter.waiting),
    ),
    Instrument(
        "gauge",
        "answers_streams_writing",
        "Texts that the built-in engine writes at once.",
        (),
        _one(lambda c: c.answers.streams.writing),
    ),
    Instrument(
        "gauge",
        "answers_streams_queued",
        "Texts that wait for it.",
        (),
        _one(lambda c: c.answers.streams.queued),
    ),
    # database, disk, and what the organiser has to renew
    Instrument(
        "histogram",
        "database_read_seconds",
        "A view of the database.",
        (),
        _timed(lambda c: c.db.reads),
    ),
    Instrument(
        "histogram",
        "database_write_seconds",
        "A transaction, the wait for its turn included.",
        (),
        _timed(lambda c: c.db.writes),
    ),
    Instrument(
        "gauge",
        "database_failed",
        "1 when nothing can be written any more.",
        (),
        _one(lambda c: float(bool(c.db.failed))),
    ),
    Instrument(
        "gauge",
        "database_bytes",
        "Size of the SQLite file and its journal.",
        (),
        _database_bytes,
    ),
    Instrument(
        "gauge",
        "disk_free_bytes",
        "Free bytes of the data directory.",
        (),
        _one(lambda c: c.space.free_bytes()),
    ),
    Instrument(
        "gauge",
        "disk_floor_bytes",
        "With less than that nothing new is accepted.",
        (),
        _one(lambda c: c.space.floor_bytes),
    ),
    Instrument(
        "gauge",
        "read_only",
        "1 while nothing new is accepted.",
        (),
        _one(lambda c: float(c.space.read_only)),
    ),
    Instrument(
        "gauge",
        "backup_timestamp_seconds",
        "When the newest backup was made; 0: never.",
        (),
        _backup,
    ),
    Instrument(
        "gauge",
        "certificate_end_timestamp_seconds",
        "When the TLS certificate ends.",
        (),
        _certificate,
    ),
    Instrument(
        "gauge",
        "build_info",
        "1, with the version of the software.",
        ("version",),
        lambda s: [((software(),), 1.0)],
    ),
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

        for each in INSTRUMENTS:
            name, found = PREFIX + each.name, each.read(self._scrape)
            if isinstance(found, Durations):
                histogram = HistogramMetricFamily(name, each.help, labels=each.labels)
                histogram.add_metric((), found.buckets(), found.total_s)
                yield histogram
                continue
            family = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            metric = family(name, each.help, labels=each.labels)
            for labels, value in each.samples(self._scrape).items():
                metric.add_metric(labels, value)
            yield metric


async def exposition(coordinator: Coordinator) -> tuple[str, bytes]:
    """Return content type and body. Raises Unavailable when the database does not answer."""
    from prometheus_client import (
        CONTENT_TYPE_LATEST,
        CollectorRegistry,
        ProcessCollector,
        generate_latest,
    )

    registry = CollectorRegistry()
    registry.register(_Collector(Scrape(coordinator, await coordinator.gauges.get())))
    ProcessCollector(registry=registry)
    return CONTENT_TYPE_LATEST, generate_latest(registry)
