"""Structs of a coordinator's overview, as `coordinator top` shows it.

The builders of the lists bound them, and cut texts that others wrote. Instants are UTC epoch
seconds; rates are per hour unless their names say otherwise.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from coordinator.rules.audits import OFFERED_AFTER_S
from coordinator.rules.machine_time import MachineTime
from shared.protocol.base import Standstill
from shared.text import duration

Level = Literal["good", "watch", "bad"]


class OverviewPart(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts of the overview."""


class Trouble(OverviewPart, frozen=True, kw_only=True):
    """Trouble that the organiser should know, with its remedy."""

    level: Level
    subject: str  # run, or part of the coordinator, that is in trouble
    text: str
    todo: str = ""


class Flow(OverviewPart, frozen=True, kw_only=True):
    """Work per hour that volunteers push, or that merges pull into versions."""

    contributions: float = 0.0
    samples: float = 0.0
    episodes: float = 0.0  # games, or other episodes


class RunLine(OverviewPart, frozen=True, kw_only=True):
    """One run."""

    name: str
    state: str
    workload: str
    version: int  # -1 before start
    versions_an_hour: float
    loss: float | None
    standstill: Standstill | None = None
    started_at: float | None
    head_at: float | None  # time of the newest version
    workers: int  # workers that hold a task of the run
    todo: int = 0
    doing: int = 0
    failed: int = 0  # discarded tasks
    checking: int = 0  # contributions that wait for their verdict
    accepted: int = 0  # updates that wait for the merge
    steps: int = 0  # merged steps
    tokens: int = 0
    time: MachineTime | None = None  # None: too little machine time in the last day
    pushed: Flow  # work submitted by volunteers in the window
    pulled: Flow  # work merged into versions


class TaskCount(OverviewPart, frozen=True, kw_only=True):
    """Open tasks of one kind and state, over all runs."""

    kind: str
    state: str
    count: int


class FailedLine(OverviewPart, frozen=True, kw_only=True):
    """Discarded task with its last failure."""

    id: int
    run: str
    kind: str
    failures: int
    timeouts: int
    message: str


class WorkerLine(OverviewPart, frozen=True, kw_only=True):
    """One worker: its state, speed, and recent failures."""

    id: str
    volunteer: str
    hostname: str
    state: str
    last_seen: float
    step_flops: float
    task: int | None = None
    run: str = ""
    good: int = 0  # contributions of the window that were found good
    refused: int = 0
    failures: int = 0  # tasks that it failed, or let time out


class MergeLine(OverviewPart, frozen=True, kw_only=True):
    """One merge, running or ended."""

    run: str
    version: int
    state: str
    at: float
    seconds: float  # duration so far, or in all
    contributions: int
    staleness: float | None = None  # mean of the contributions in the window
    staleness_max: int | None = None
    message: str = ""


class RefusalCount(OverviewPart, frozen=True, kw_only=True):
    """Contributions refused for one reason, in the window."""

    reason: str
    count: int
    newest: str  # sentence of the newest refusal
    at: float


class ContributionWindow(OverviewPart, frozen=True, kw_only=True):
    """Newest contributions, the source of rates, refusals and staleness."""

    since: float
    contributions: int
    good: int = 0
    refused: int = 0
    undecided: int = 0
    bytes_an_hour: float = 0.0


class DrawCounts(OverviewPart, frozen=True, kw_only=True):
    """Draws by their result."""

    passed: int = 0
    failed: int = 0
    unproven: int = 0
    open: int = 0  # draws without a result

    @property
    def words(self) -> str:
        counts = ((getattr(self, name), name) for name in DrawCounts.__struct_fields__)
        return ", ".join(f"{count} {name}" for count, name in counts if count)


class Backlog(OverviewPart, frozen=True, kw_only=True):
    """Waiting recomputes, the time that they take, and the reasons why some cannot be made."""

    waiting: int = 0  # recomputes without a result
    # Time that the waiting recomputes take at the recent speed; None if no recompute was made
    # lately.
    seconds: float | None = None
    # Reasons why some recomputes cannot be made here now, each with the number of recomputes.
    reasons: tuple[tuple[str, int], ...] = ()

    @property
    def words(self) -> str:
        if not self.waiting:
            return "nothing"
        sentence = str(self.waiting)
        if self.seconds:
            sentence += f", {duration(self.seconds)} of work"
        if (self.seconds or 0.0) > OFFERED_AFTER_S:
            sentence += ": `coordinator checker work` on another machine takes its part"
        return sentence


class ReplicaFigures(OverviewPart, frozen=True, kw_only=True):
    """Figures of one serving process."""

    name: str = ""
    where: str = ""  # address of the process; machine and port if several share it
    software: str = ""
    closed: str = ""  # why the process accepts nothing new
    disk_free: float = 0.0
    disk_total: float = 0.0
    cpu_s: float = 0.0  # processor time since the process started
    # share of a core since the last beat; the rates below cover the same time
    cpu_share: float = 0.0
    memory: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    requests: int = 0
    errors: int = 0  # requests answered with 5xx
    requests_a_second: float = 0.0
    in_a_second: float = 0.0
    out_a_second: float = 0.0
    claims_waiting: int = 0
    answers: str = "off"  # the setting `inference`
    answers_waiting: int = 0
    answer_tokens: int = 0
    first_token_s: float | None = None  # mean time to the first token
    answering_machines: int = 0
    certificate_ends_at: float | None = None


class ReplicaLine(OverviewPart, frozen=True, kw_only=True):
    """One serving process, as of its last beat."""

    id: str
    started_at: float
    beat_at: float
    figures: ReplicaFigures


class DatabaseFigures(OverviewPart, frozen=True, kw_only=True):
    """The database itself."""

    kind: str
    bytes: int
    failed: str = ""  # reason why writes are impossible
    ahead_s: float = 0.0  # lead of its clock over the observing machine's


class Figures(OverviewPart, frozen=True, kw_only=True):
    """Figures of the whole coordinator that need no history."""

    at: float
    workers: dict[str, int]  # by state
    volunteers: dict[str, int]  # counts by standing; banned ones are counted apart
    backlog: Backlog = Backlog()
    database: DatabaseFigures
    backup_at: float | None


class Gauges(Figures, frozen=True, kw_only=True):
    """Figures for one request of the metrics."""

    runs: tuple[RunLine, ...]  # runs without flows
    queues: dict[str, int]


class WholeFigures(Figures, frozen=True, kw_only=True):
    """Figures shared by census and overview."""

    machines: tuple[WorkerLine, ...]
    window: ContributionWindow
    refusals: tuple[RefusalCount, ...]
    recompute: DrawCounts


class Census(WholeFigures, frozen=True, kw_only=True):
    """Counts over all workers and the newest contributions, some seconds old."""

    pushed: dict[int, Flow]  # by run
    pulled: dict[int, Flow]
    staleness: dict[str, tuple[float, int]]  # mean and largest, by "RUN VERSION"


class Overview(WholeFigures, frozen=True, kw_only=True):
    """Complete overview at one instant."""

    server: str
    runs: tuple[RunLine, ...]
    runs_total: int
    tasks: tuple[TaskCount, ...]
    failed: tuple[FailedLine, ...]
    queues: dict[str, int]
    merges: tuple[MergeLine, ...]
    replicas: tuple[ReplicaLine, ...]
    verdict: Trouble = Trouble(level="good", subject="", text="")
    troubles: tuple[Trouble, ...] = ()
