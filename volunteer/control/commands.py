"""What can be asked of a running volunteer, as data: the same in this process and over the local socket."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar, dataclass_transform

import msgspec

from shared.protocol.accounts import Benchmark, LinkCode, RunInfo, ServerInfo, WorkerInfo
from shared.protocol.heartbeat import LeaderRow, LedgerRow, LossPoint, Summary
from shared.protocol.work import Verdict, VersionInfo
from volunteer.control.events import AnyEvent
from volunteer.control.status import Status

How = Literal["release", "save", "finish"]

T = TypeVar("T")


class PublicRun(msgspec.Struct, frozen=True, kw_only=True):
    """One entry; `link` is a join link."""

    name: str
    description: str = ""
    link: str = ""


class SettingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, what it is now, and who said so."""

    name: str
    value: Any
    source: str  # "flag", "environment", "config.toml", "default"
    type: str
    default: str
    unit: str
    help: str


@dataclass_transform(
    frozen_default=True, kw_only_default=True
)  # what the base says of all, said to the type checker
class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all commands; the tag is the class name."""


class Ask(Command, Generic[T]):
    """Base of the commands that are answered with a value."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """An account at a coordinator."""

    server: str
    url: str
    fingerprint: str
    nickname: str
    created: bool  # False: it was there before


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A page of what was handed in; `cursor` continues it, empty: that was all."""

    verdicts: tuple[Verdict, ...]
    cursor: str = ""


class GetStatus(Ask[Status]):
    pass


class Probe(Ask[ServerInfo]):
    """Who answers at a join link; nothing is told to them."""

    link: str


class Join(Ask[Joined]):
    """Make an account (or find the one made before) and go to work with it."""

    link: str
    name: str = ""


class Pause(Command):
    device: str = ""  # empty: all
    by: str = "you"
    message: str = "paused"
    until: str = "you resume"


class Resume(Command):
    device: str = ""
    by: str = "you"


class Finish(Command):
    """Complete the tasks in work and take no more."""


class Stop(Command):
    """End the program."""

    how: How = "release"


class Retry(Command):
    """Try the coordinator again now."""


class Consent(Command):
    run: str


class Measure(Command):
    """Benchmark a device."""

    device: str = ""
    quick: bool = False


class StopMeasuring(Command):
    """End a benchmark that is under way."""


class GetMeasured(Ask[tuple[Benchmark, ...]]):
    """All benchmarks of this machine that are remembered, oldest first."""


class GetInvitation(Ask[str]):
    """A link with which others can join the same coordinator, as far as it lets them."""


class StartPractice(Ask[str]):
    """A private coordinator on this machine, to practise; answered with its link. May take a minute the first time."""


class GetPublicRuns(Ask[tuple[PublicRun, ...]]):
    """What is listed at the address of the setting `public_runs`."""


class ChooseRuns(Command):
    """Help only these from the next task on; empty = any. Also written to config.toml."""

    runs: tuple[str, ...]


class GetSettings(Ask[tuple[SettingRow, ...]]):
    pass


class SetSettings(Ask[tuple[SettingRow, ...]]):
    """Written to config.toml; rules (rules.py) hold at once, the rest from the next start."""

    changes: dict[str, Any]


class GetRuns(Ask[tuple[RunInfo, ...]]):
    pass


class GetVersions(Ask[tuple[VersionInfo, ...]]):
    run: str
    cursor: str = ""


class GetLoss(Ask[tuple[LossPoint, ...]]):
    run: str


class GetSummary(Ask[Summary]):
    run: str


class GetWorkers(Ask[tuple[WorkerInfo, ...]]):
    run: str


class GetLeaders(Ask[tuple[LeaderRow, ...]]):
    run: str = ""
    days: int = 0


class GetLedger(Ask[tuple[LedgerRow, ...]]):
    cursor: str = ""


class GetHistory(Ask[History]):
    cursor: str = ""


class MakeLink(Ask[LinkCode]):
    """A ten-minute code for another machine of the same account."""


AnyCommand = (
    GetStatus
    | Probe
    | Join
    | Pause
    | Resume
    | Finish
    | Stop
    | Retry
    | Consent
    | Measure
    | StopMeasuring
    | GetMeasured
    | GetInvitation
    | StartPractice
    | GetPublicRuns
    | ChooseRuns
    | GetSettings
    | SetSettings
    | GetRuns
    | GetVersions
    | GetLoss
    | GetSummary
    | GetWorkers
    | GetLeaders
    | GetLedger
    | GetHistory
    | MakeLink
)

# What comes back, for the side that reads it from a socket.
REPLIES: dict[type[Command], Any] = {
    GetStatus: Status,
    Probe: ServerInfo,
    Join: Joined,
    GetSettings: tuple[SettingRow, ...],
    SetSettings: tuple[SettingRow, ...],
    GetMeasured: tuple[Benchmark, ...],
    GetInvitation: str,
    StartPractice: str,
    GetPublicRuns: tuple[PublicRun, ...],
    GetRuns: tuple[RunInfo, ...],
    GetVersions: tuple[VersionInfo, ...],
    GetLoss: tuple[LossPoint, ...],
    GetSummary: Summary,
    GetWorkers: tuple[WorkerInfo, ...],
    GetLeaders: tuple[LeaderRow, ...],
    GetLedger: tuple[LedgerRow, ...],
    GetHistory: History,
    MakeLink: LinkCode,
}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One line to the volunteer."""

    id: int
    command: AnyCommand


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """One line back: what a command gave, or the error it ended with."""

    id: int
    value: msgspec.Raw = msgspec.Raw(b"null")
    code: str = ""  # of the error
    message: str = ""


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """One line back: something happened."""

    event: AnyEvent


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """The first line back, and again to somebody who fell behind."""

    status: Status
