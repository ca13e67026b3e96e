"""Commands about audits: the audit log line by line, whether all of it still holds, and recomputes
on machines of the organiser's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from coordinator.accounts.transparency import RecordReport
from coordinator.admin.command import Ask, Command, Nothing, reason
from coordinator.checking.auditing import Offer, Settled
from coordinator.database.audit import LISTING_MAX, AuditRow
from coordinator.rules.checks import Machine, Redone

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


class TakeAudit(Ask, frozen=True, kw_only=True):
    """An auditor with this device asks for a task to do again, to hold under a name of its own."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    kind: str
    model: Annotated[str, Meta(max_length=128)] = ""
    hold: str


class Held(Ask, frozen=True, kw_only=True):
    """A recompute that an auditor has."""

    contribution: int
    hold: str


class Renewed(msgspec.Struct, frozen=True, kw_only=True):
    """True where the auditor goes on."""

    held: bool


class ReportAudit(Held, frozen=True, kw_only=True):
    """End of a recompute: figures, evidence of no use, or given back (`failed` or not)."""

    kind: str
    model: Annotated[str, Meta(max_length=128)] = ""
    found: Redone | None = None
    unusable: str = ""
    failed: bool = False
    seconds: Annotated[float, Meta(ge=0)] = 0.0


async def take(coordinator: Coordinator, ask: TakeAudit) -> Offer:
    machine = Machine(kind=ask.kind, model=ask.model)
    return await coordinator.auditing.take(ask.name, machine, ask.hold)


async def renew(coordinator: Coordinator, ask: Held) -> Renewed:
    return Renewed(held=await coordinator.auditing.renew(ask.contribution, ask.hold))


async def report(coordinator: Coordinator, ask: ReportAudit) -> Settled:
    auditing, place = coordinator.auditing, (ask.contribution, ask.hold)
    if ask.found is not None:
        machine = Machine(kind=ask.kind, model=ask.model)
        return await auditing.report(*place, ask.found, machine, ask.seconds)
    if ask.unusable:
        return await auditing.refute(*place, reason(ask.unusable))
    return await auditing.give_back(*place, failed=ask.failed)


COMMANDS = (
    Command(name="audit.take", request=TakeAudit, reply=Offer, run=take),
    Command(name="audit.renew", request=Held, reply=Renewed, run=renew),
    Command(name="audit.report", request=ReportAudit, reply=Settled, run=report),
    Command(name="audit.list", request=ListAudit, reply=AuditPage, run=listing, needs="database"),
    Command(name="audit.verify", request=Nothing, reply=RecordReport, run=verify, needs="database"),
)
