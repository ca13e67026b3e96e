"""Commands of checkers: recomputes on machines of the organiser's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from coordinator.admin.command import CommandRequest, OrganiserCommand, reason
from coordinator.checking.checkers import CheckerOffer, CheckerVerdict
from coordinator.rules.checks import ComputeDevice, Redone

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class TakeRecompute(CommandRequest, frozen=True, kw_only=True):
    """Request of a checker with this device for a recompute, held under its own name."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    kind: str
    model: Annotated[str, Meta(max_length=128)] = ""
    hold: str


class HeldRecompute(CommandRequest, frozen=True, kw_only=True):
    """Recompute held by a checker."""

    contribution: int
    hold: str


class RenewedRecompute(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a renewal: True if the checker still holds the recompute."""

    held: bool


class ReportRecompute(HeldRecompute, frozen=True, kw_only=True):
    """End of a recompute: figures, useless evidence, or release (`failed` or not)."""

    kind: str
    model: Annotated[str, Meta(max_length=128)] = ""
    found: Redone | None = None
    unusable: str = ""
    failed: bool = False
    seconds: Annotated[float, Meta(ge=0)] = 0.0


async def take(coordinator: Coordinator, ask: TakeRecompute) -> CheckerOffer:
    machine = ComputeDevice(kind=ask.kind, model=ask.model)
    return await coordinator.checkers.take(ask.name, machine, ask.hold)


async def renew(coordinator: Coordinator, ask: HeldRecompute) -> RenewedRecompute:
    return RenewedRecompute(held=await coordinator.checkers.renew(ask.contribution, ask.hold))


async def report(coordinator: Coordinator, ask: ReportRecompute) -> CheckerVerdict:
    checkers, place = coordinator.checkers, (ask.contribution, ask.hold)
    if ask.found is not None:
        machine = ComputeDevice(kind=ask.kind, model=ask.model)
        return await checkers.report(*place, ask.found, machine, ask.seconds)
    if ask.unusable:
        return await checkers.refute(*place, reason(ask.unusable))
    return await checkers.give_back(*place, failed=ask.failed)


COMMANDS = (
    OrganiserCommand(name="checker.take", request=TakeRecompute, reply=CheckerOffer, run=take),
    OrganiserCommand(
        name="checker.renew", request=HeldRecompute, reply=RenewedRecompute, run=renew
    ),
    OrganiserCommand(
        name="checker.report", request=ReportRecompute, reply=CheckerVerdict, run=report
    ),
)
