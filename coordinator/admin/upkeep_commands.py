"""Commands about the whole coordinator: its overview, record, checks, backups and alerts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from coordinator.accounts.transparency import RecordReport
from coordinator.admin.command import CommandRequest, EmptyRequest, organiser_command
from coordinator.database.record import LISTING_MAX, RecordLine
from coordinator.rules.health import StandingAlert
from coordinator.rules.overview import Overview
from coordinator.upkeep.alerts import TestDelivery
from coordinator.upkeep.backup import BackupPlace, BackupSummary, FolderPlace
from coordinator.upkeep.backup import backup as make_backup
from coordinator.upkeep.full_check import CheckReport
from coordinator.upkeep.stored_backups import StoredBackups
from shared.errors import BadRequest

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class Backup(CommandRequest, frozen=True, kw_only=True):
    """Request for a backup to folder `to` on the machine of the server, or through that folder to a
    store.
    """

    to: str
    like: str = ""  # an earlier backup on the same file system
    store: str = ""


class Top(CommandRequest, frozen=True, kw_only=True):
    """Request for the overview; `forget_silent` first deletes the rows of servers that ended."""

    forget_silent: bool = False


class ListRecord(CommandRequest, frozen=True, kw_only=True):
    """Request for record lines, newest first; `before` is the number of the last line seen."""

    before: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    limit: Annotated[int, Meta(ge=1, le=LISTING_MAX)] = 100


class RecordPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some lines of the record, newest first."""

    rows: tuple[RecordLine, ...]


@organiser_command("check")
async def check(coordinator: Coordinator, ask: EmptyRequest) -> CheckReport:
    return await coordinator.checks.run()


@organiser_command("top", needs="database")
async def top(coordinator: Coordinator, ask: Top) -> Overview:
    if ask.forget_silent:
        await coordinator.overviews.forget_silent()
    return await coordinator.overviews.get()


@organiser_command("backup", remote=False)
async def backup(coordinator: Coordinator, ask: Backup) -> BackupSummary:
    c = coordinator
    to = Path(ask.to)
    if to.is_relative_to(c.settings.directory):
        raise BadRequest(
            f"{to} lies in the data directory, and would be lost with it: name a folder elsewhere"
        )
    place: BackupPlace = FolderPlace(c.blobs, to, Path(ask.like) if ask.like else None)
    if ask.store:
        if ask.store.rstrip("/") == c.settings.blobs_url.rstrip("/"):
            raise BadRequest(
                f"{ask.store} is where the coordinator keeps its blobs: name another prefix"
            )
        place = await StoredBackups(ask.store, to.parent).place(c.blobs)
    return await make_backup(c.db, c.blobs, c.settings, c.clock, to, place)


@organiser_command("alerts.test")
async def alerts_test(coordinator: Coordinator, ask: EmptyRequest) -> TestDelivery:
    return await coordinator.alerts.test()


@organiser_command("alerts.list", needs="database")
async def alerts_list(coordinator: Coordinator, ask: EmptyRequest) -> tuple[StandingAlert, ...]:
    return await coordinator.alerts.list()


@organiser_command("record.list", needs="database")
async def record_list(coordinator: Coordinator, ask: ListRecord) -> RecordPage:
    return RecordPage(rows=await coordinator.transparency.record_lines(ask.before, ask.limit))


@organiser_command("record.verify", needs="database")
async def record_verify(coordinator: Coordinator, ask: EmptyRequest) -> RecordReport:
    return await coordinator.transparency.verify()
