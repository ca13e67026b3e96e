"""Commands about the record: its lines, and whether all of it still holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from coordinator.accounts.transparency import RecordReport
from coordinator.admin.command import Ask, Command, Nothing
from coordinator.database.audit import LISTING_MAX, AuditRow

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class ListAudit(Ask, frozen=True, kw_only=True):
    """Newest first; `before` is the number of the last line seen."""

    before: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    limit: Annotated[int, Meta(ge=1, le=LISTING_MAX)] = 100


class AuditPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some lines of the audit log, newest first."""

    rows: tuple[AuditRow, ...]


async def listing(coordinator: Coordinator, ask: ListAudit) -> AuditPage:
    return AuditPage(rows=await coordinator.transparency.audit_lines(ask.before, ask.limit))


async def verify(coordinator: Coordinator, ask: Nothing) -> RecordReport:
    return await coordinator.transparency.verify()


COMMANDS = (
    Command(name="record.list", request=ListAudit, reply=AuditPage, run=listing, needs="database"),
    Command(
        name="record.verify", request=Nothing, reply=RecordReport, run=verify, needs="database"
    ),
)
