"""Commands of checkers: recomputes on machines of the organiser's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from coordinator.admin.command import CommandRequest, organiser_command
from coordinator.checking.checkers import CheckerOffer, CheckerOutcome, CheckerVerdict
from coordinator.rules.draws import ComputeDevice

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class TakeRecompute(CommandRequest, frozen=True, kw_only=True):
    """Request of a checker for a recompute on its device; `hold` names the checker's hold on it."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    machine: ComputeDevice
    hold: str


class HeldRecompute(CommandRequest, frozen=True, kw_only=True):
    """Recompute held by a checker."""

    contribution: int
    hold: str


class RenewedRecompute(msgspec.Struct, frozen=True, kw_only=True):
    """Reply to a renewal: True if the checker still holds the recompute."""

    held: bool


class ReportRecompute(HeldRecompute, frozen=True, kw_only=True):
    """Outcome of a recompute that a checker held, and the device that made it."""

    machine: ComputeDevice
    outcome: CheckerOutcome


@organiser_command("checker.take")
async def take(coordinator: Coordinator, ask: TakeRecompute) -> CheckerOffer:
    return await coordinator.checkers.take(ask.name, ask.machine, ask.hold)


@organiser_command("checker.renew")
async def renew(coordinator: Coordinator, ask: HeldRecompute) -> RenewedRecompute:
    return RenewedRecompute(held=await coordinator.checkers.renew(ask.contribution, ask.hold))


@organiser_command("checker.report")
async def report(coordinator: Coordinator, ask: ReportRecompute) -> CheckerVerdict:
    return await coordinator.checkers.report(ask.contribution, ask.hold, ask.machine, ask.outcome)
