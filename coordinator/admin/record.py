"""Commands about the record: its lines, and its verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from coordinator.accounts.transparency import RecordReport
from coordinator.admin.command import CommandRequest, Nothing, organiser_command
from coordinator.database.record import LISTING_MAX, RecordLine

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class ListRecord(CommandRequest, frozen=True, kw_only=True):
    """Request for record lines, newest first; `before` is the number of the last line seen."""

    before: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    limit: Annotated[int, Meta(ge=1, le=LISTING_MAX)] = 100


class RecordPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some lines of the record, newest first."""

    rows: tuple[RecordLine, ...]


@organiser_command("record.list", needs="database")
async def listing(coordinator: Coordinator, ask: ListRecord) -> RecordPage:
    return RecordPage(rows=await coordinator.transparency.record_lines(ask.before, ask.limit))


@organiser_command("record.verify", needs="database")
async def verify(coordinator: Coordinator, ask: Nothing) -> RecordReport:
    return await coordinator.transparency.verify()
