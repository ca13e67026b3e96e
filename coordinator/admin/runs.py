"""Commands about runs."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.suspension import reason_line
from coordinator.admin.command import (
    CommandRequest,
    ConfirmedRequest,
    EmptyRequest,
    NameRequest,
    ReasonedRequest,
    organiser_command,
)
from coordinator.database import runs
from coordinator.database.standings import CostOfChecks
from coordinator.database.statistics import VolunteerSummary
from coordinator.experience.rollouts import newest
from coordinator.merging.rollback_proposal import Proposal, proposal
from coordinator.rules.machine_time import MachineTime
from coordinator.rules.provable_length import described
from coordinator.rules.run_file import StopSettings, parse
from coordinator.runs.definition import definition
from coordinator.runs.example import example, example_dataset
from coordinator.runs.export import Exported
from coordinator.runs.member_figures import MemberFigures
from coordinator.runs.queries import DecidedCounts, ExperienceFigures
from coordinator.runs.wind_down import VERSION, Deed, Difference
from shared.errors import BadRequest
from shared.protocol.accounts import RunInfo
from shared.protocol.listings import LeaderRow
from shared.protocol.versions import VersionInfo
from shared.workloads.experience import Rollout
from shared.workloads.model_files import PLAIN

if TYPE_CHECKING:
    from coordinator.plan.plan_tables import Plan
    from coordinator.services import Coordinator

SHOWN_VERSIONS, SHOWN_LEADERS = 20, 10


class CreateRun(CommandRequest, frozen=True, kw_only=True):
    """Request for a run from the text of a run file, or the example."""

    text: str = ""
    example: bool = False


class Rollback(CommandRequest, frozen=True, kw_only=True):
    name: str
    to: int
    reason: str = ""


class ExportRun(CommandRequest, frozen=True, kw_only=True):
    """Request for an export to directory `to` on the machine that runs the command; without a
    directory, to a transfer box.
    """

    name: str
    version: int | None = None
    to: str = ""
    format: str = PLAIN
    dtype: str = ""  # number type of the weights; "" = the format's default


class ExportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Files of an export, and the transfer box to fetch them from; "" if no box was used."""

    exported: Exported
    box: str = ""


class RolloutsRequest(CommandRequest, frozen=True, kw_only=True):
    """Request for the newest answers of a run, or of one version."""

    name: str
    version: int | None = None
    limit: int = 16


class ExtendRun(ConfirmedRequest, frozen=True, kw_only=True):
    stop: StopSettings


class ForkRun(ConfirmedRequest, frozen=True, kw_only=True):
    """Request for a fork. `source` is a version, like my-run@40; `name` is the draft's."""

    source: str


class DiffRuns(CommandRequest, frozen=True, kw_only=True):
    first: str
    second: str


class RunShown(msgspec.Struct, frozen=True, kw_only=True):
    """One run with its newest versions, oldest first."""

    run: RunInfo
    versions: tuple[VersionInfo, ...]
    codec: str = ""  # codec of updates on their way to the server
    downlink: str = ""  # how versions are sent to the volunteers
    rule: str = ""  # aggregation rule
    gate: bool = False  # versions are evaluated before they are published
    heal: Proposal | None = None  # a rollback that is proposed
    checks: CostOfChecks | None = None
    drift: str = ""  # measured drift of a task, and the bound of its steps
    advice: tuple[str, ...] = ()
    contributions: DecidedCounts | None = None
    time: MachineTime | None = None  # use of its machines' time over the last day
    experience: ExperienceFigures | None = None  # figures of a run that makes its own data
    members: MemberFigures | None = None  # of a run whose members keep its data
    leaders: tuple[LeaderRow, ...] = ()  # volunteers who agreed to be shown


class CreatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Stored run, and advice on its file."""

    run: RunInfo
    advice: tuple[str, ...] = ()


@organiser_command("run.create", needs="nothing")
async def create(coordinator: Coordinator, ask: CreateRun) -> CreatedRun:
    if ask.example and ask.text:
        raise BadRequest("give a run file, or --example")
    text = example() if ask.example else ask.text
    if ask.example:  # building its dataset takes seconds, so check the name first
        await coordinator.db.read(lambda conn: runs.check_free(conn, parse(text).name))
        await example_dataset(coordinator.datasets)
    run = await coordinator.runs.create(text)
    return CreatedRun(run=run, advice=await coordinator.runs.queries.advice(run.name))


@organiser_command("run.start")
async def start(coordinator: Coordinator, ask: NameRequest) -> RunInfo:
    return await coordinator.runs.start(ask.name)


@organiser_command("run.list", needs="database")
async def listing(coordinator: Coordinator, ask: EmptyRequest) -> tuple[RunInfo, ...]:
    return await coordinator.runs.queries.listing()


@organiser_command("run.show", needs="database")
async def show(coordinator: Coordinator, ask: NameRequest) -> RunShown:
    run = await coordinator.runs.queries.info(ask.name)
    versions = await coordinator.runs.queries.versions(ask.name, after=run.version - SHOWN_VERSIONS)
    row = await coordinator.db.read(lambda conn: runs.by_name(conn, ask.name))
    plan, file = definition(row).plan, definition(row).file
    heal = await coordinator.db.read(lambda conn: proposal(conn, row))
    leaders = await coordinator.volunteers.leaderboard(ask.name, seldom=True)
    return RunShown(
        run=run,
        versions=versions,
        codec=plan.codec,
        downlink=plan.downlink,
        rule=_rule(plan),
        gate=file.evaluation.gate,
        heal=heal,
        checks=await coordinator.runs.queries.checks(ask.name),
        drift=described(row.drift, row.drift_version, row.steps_provable),
        advice=await coordinator.runs.queries.advice(ask.name),
        contributions=await coordinator.runs.queries.decided(ask.name),
        time=await coordinator.runs.queries.machine_time(ask.name),
        experience=await coordinator.runs.queries.experience(ask.name),
        members=await coordinator.runs.queries.members(ask.name),
        leaders=leaders[:SHOWN_LEADERS],
    )


def _rule(plan: Plan) -> str:
    few = plan.aggregate_from
    if plan.aggregate == "mean" or few == 1:
        return plan.aggregate
    return f"{plan.aggregate} from {few} contributions on, mean of fewer"


@organiser_command("run.delete", needs="database")
async def delete(coordinator: Coordinator, ask: ConfirmedRequest) -> Deed:
    return await coordinator.wind_down.delete_run(ask.name, yes=ask.yes)


@organiser_command("run.extend", needs="database")
async def extend(coordinator: Coordinator, ask: ExtendRun) -> Deed:
    return await coordinator.wind_down.extend(ask.name, ask.stop, yes=ask.yes)


@organiser_command("run.fork", needs="database")
async def fork(coordinator: Coordinator, ask: ForkRun) -> Deed:
    return await coordinator.wind_down.fork(ask.source, ask.name, yes=ask.yes)


@organiser_command("run.diff", needs="database")
async def diff(coordinator: Coordinator, ask: DiffRuns) -> tuple[Difference, ...]:
    return await coordinator.wind_down.diff(ask.first, ask.second)


@organiser_command("run.pause", needs="database")
async def pause(coordinator: Coordinator, ask: ReasonedRequest) -> RunInfo:
    return await coordinator.runs.pause(ask.name, reason_line(ask.reason))


@organiser_command("run.resume", needs="database")
async def resume(coordinator: Coordinator, ask: ReasonedRequest) -> RunInfo:
    return await coordinator.runs.resume(ask.name, reason_line(ask.reason))


@organiser_command("run.stop", needs="database")
async def stop(coordinator: Coordinator, ask: ReasonedRequest) -> RunInfo:
    why = reason_line(ask.reason)
    return await coordinator.runs.stop(ask.name, *([why] if why else []))


@organiser_command("run.rollback")
async def rollback(coordinator: Coordinator, ask: Rollback) -> RunInfo:
    return await coordinator.runs.rollback(ask.name, ask.to, reason_line(ask.reason))


@organiser_command("run.report", needs="database")
async def report(coordinator: Coordinator, ask: NameRequest) -> tuple[VolunteerSummary, ...]:
    return await coordinator.volunteers.report(ask.name)


@organiser_command("run.rollouts")
async def rollouts(coordinator: Coordinator, ask: RolloutsRequest) -> tuple[Rollout, ...]:
    inside = coordinator.db, coordinator.blobs
    return await newest(*inside, ask.name, version=ask.version, limit=ask.limit)


@organiser_command("run.export")
async def export(coordinator: Coordinator, ask: ExportRun) -> ExportedRun:
    match = VERSION.fullmatch(ask.name)
    if match and ask.version is not None:
        raise BadRequest(f"give the version once: {ask.name}, or --version")
    name, version = (match["run"], int(match["version"])) if match else (ask.name, ask.version)
    how = version, ask.format, ask.dtype
    if ask.to:
        exported = await coordinator.export.export(name, Path(ask.to), *how)
        return ExportedRun(exported=exported)
    box = secrets.token_hex(16)
    to = coordinator.boxes.folder(box)
    exported = await coordinator.export.export(name, to, *how)
    return ExportedRun(exported=msgspec.structs.replace(exported, path=""), box=box)
