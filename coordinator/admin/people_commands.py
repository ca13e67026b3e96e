"""Commands about volunteers and invites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.accounts import VolunteerDetails
from coordinator.accounts.api_keys import GrantResult
from coordinator.accounts.invites import InviteInfo, NewCode
from coordinator.accounts.organiser_reversals import Reversal
from coordinator.admin.command import (
    CommandRequest,
    EmptyRequest,
    NameRequest,
    NumberRequest,
    ReasonedRequest,
    organiser_command,
)
from coordinator.database.standings import TrustReport
from coordinator.database.statistics import VolunteerSummary
from shared.network.links import format_link
from shared.protocol.heartbeat import Announcement
from shared.protocol.inference import NewKey

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class CreateInvites(CommandRequest, frozen=True, kw_only=True):
    """Request for invites: one for each name, or `count` without names."""

    names: tuple[str, ...] = ()
    count: int = 1
    uses: int = 1
    expires_s: float | None = None


class NewOrganiserKey(CommandRequest, frozen=True, kw_only=True):
    """Request for a key of the organiser's, on the account of a volunteer."""

    name: str
    expires_s: float | None = None


class Rename(CommandRequest, frozen=True, kw_only=True):
    name: str
    to: str


class Ban(CommandRequest, frozen=True, kw_only=True):
    """Request for a ban; with `reverse` the account is suspended and its pay reversed."""

    name: str
    reverse: bool = False
    reason: str = ""


class Reverse(CommandRequest, frozen=True, kw_only=True):
    """Request to reverse a volunteer's pay for submissions since `since` (UTC epoch seconds)."""

    name: str
    since: float
    reason: str


class ReverseContribution(CommandRequest, frozen=True, kw_only=True):
    id: int
    reason: str


class CreditGrant(CommandRequest, frozen=True, kw_only=True):
    """Credits for a volunteer, from the organiser."""

    name: str
    amount_micro: int
    reason: str


class InviteLink(msgspec.Struct, frozen=True, kw_only=True):
    """New invite with its code, which is never shown again."""

    id: int
    label: str
    link: str
    expires_at: float | None
    message: tuple[str, ...]  # lines to send with the link; () if no other machine reaches it


class ActionDone(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation of an action: the verb, and the affected volunteer."""

    done: str
    name: str


class BanDone(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation of a ban, with the reversed pay where a reversal was asked for."""

    name: str
    done: str = "banned"
    reversal: Reversal | None = None


async def _link(coordinator: Coordinator, code: NewCode) -> InviteLink:
    link = format_link(coordinator.server.link(code.code))
    return InviteLink(
        id=code.id,
        label=code.label,
        link=link,
        expires_at=code.expires_at,
        message=tuple(await coordinator.server.message(link)),
    )


class Announce(CommandRequest, frozen=True, kw_only=True):
    """Announcement to everybody, perhaps about a run, shown until `until` (UTC epoch seconds)."""

    text: str
    run: str = ""
    until: float | None = None


@organiser_command("announce")
async def announce(coordinator: Coordinator, ask: Announce) -> Announcement:
    return await coordinator.heartbeats.announcements.add(ask.text, ask.run, ask.until)


@organiser_command("announce.list")
async def announce_list(coordinator: Coordinator, ask: EmptyRequest) -> tuple[Announcement, ...]:
    return await coordinator.heartbeats.announcements.standing()


@organiser_command("announce.withdraw")
async def announce_withdraw(coordinator: Coordinator, ask: NumberRequest) -> Announcement:
    return await coordinator.heartbeats.announcements.withdraw(ask.id)


@organiser_command("invite.create")
async def invite_create(coordinator: Coordinator, ask: CreateInvites) -> tuple[InviteLink, ...]:
    codes = await coordinator.volunteers.invites.create(
        ask.names, count=ask.count, uses=ask.uses, expires_s=ask.expires_s
    )
    return tuple([await _link(coordinator, code) for code in codes])


@organiser_command("invite.list", needs="database")
async def invite_list(coordinator: Coordinator, ask: EmptyRequest) -> tuple[InviteInfo, ...]:
    return await coordinator.volunteers.invites.list()


@organiser_command("invite.revoke", needs="database")
async def invite_revoke(coordinator: Coordinator, ask: NumberRequest) -> InviteInfo:
    return await coordinator.volunteers.invites.revoke(ask.id)


@organiser_command("volunteer.list", needs="database")
async def volunteer_list(
    coordinator: Coordinator, ask: EmptyRequest
) -> tuple[VolunteerSummary, ...]:
    return await coordinator.volunteers.list()


@organiser_command("volunteer.show", needs="database")
async def show(coordinator: Coordinator, ask: NameRequest) -> VolunteerDetails:
    return await coordinator.volunteers.show(ask.name)


@organiser_command("trust", needs="database")
async def trust(coordinator: Coordinator, ask: EmptyRequest) -> TrustReport:
    return await coordinator.volunteers.trust()


@organiser_command("volunteer.ban", needs="database")
async def ban(coordinator: Coordinator, ask: Ban) -> BanDone:
    if not ask.reverse:
        await coordinator.volunteers.ban(ask.name, ask.reason)
        return BanDone(name=ask.name)
    forfeited = await coordinator.volunteers.ban_and_suspend(ask.name, ask.reason)
    reversal = await coordinator.volunteers.reversals.of_volunteer(ask.name, 0.0, ask.reason)
    totals = forfeited + reversal.taken
    return BanDone(name=ask.name, reversal=Reversal(name=reversal.name, taken=totals))


@organiser_command("volunteer.reverse", needs="database")
async def reverse(coordinator: Coordinator, ask: Reverse) -> Reversal:
    return await coordinator.volunteers.reversals.of_volunteer(ask.name, ask.since, ask.reason)


@organiser_command("contribution.reverse", needs="database")
async def reverse_contribution(coordinator: Coordinator, ask: ReverseContribution) -> Reversal:
    return await coordinator.volunteers.reversals.of_contribution(ask.id, ask.reason)


@organiser_command("grant", needs="database")
async def grant(coordinator: Coordinator, ask: CreditGrant) -> GrantResult:
    return await coordinator.api_keys.grant(ask.name, ask.amount_micro, ask.reason)


@organiser_command("volunteer.key", needs="database")
async def organiser_key(coordinator: Coordinator, ask: NewOrganiserKey) -> NewKey:
    now = coordinator.clock.now()
    expires_at = None if ask.expires_s is None else now + ask.expires_s
    return await coordinator.api_keys.create_for_organiser(ask.name, expires_at)


@organiser_command("volunteer.unban", needs="database")
async def unban(coordinator: Coordinator, ask: NameRequest) -> ActionDone:
    await coordinator.volunteers.unban(ask.name)
    return ActionDone(done="let in again", name=ask.name)


@organiser_command("volunteer.suspend", needs="database")
async def suspend(coordinator: Coordinator, ask: ReasonedRequest) -> ActionDone:
    name = await coordinator.volunteers.suspend(ask.name, ask.reason)
    return ActionDone(done="suspended", name=name)


@organiser_command("volunteer.unsuspend", needs="database")
async def unsuspend(coordinator: Coordinator, ask: ReasonedRequest) -> ActionDone:
    name = await coordinator.volunteers.unsuspend(ask.name, ask.reason)
    return ActionDone(done="no longer suspended", name=name)


@organiser_command("volunteer.vouch", needs="database")
async def vouch(coordinator: Coordinator, ask: NameRequest) -> ActionDone:
    return ActionDone(done="vouched for", name=await coordinator.volunteers.vouch(ask.name))


@organiser_command("volunteer.rename", needs="database")
async def rename(coordinator: Coordinator, ask: Rename) -> ActionDone:
    name = await coordinator.volunteers.rename(ask.name, ask.to)
    return ActionDone(done="renamed", name=name)


@organiser_command("volunteer.reissue")
async def reissue(coordinator: Coordinator, ask: NameRequest) -> InviteLink:
    return await _link(coordinator, await coordinator.volunteers.reissue(ask.name))


@organiser_command("volunteer.forget", needs="database")
async def forget(coordinator: Coordinator, ask: NameRequest) -> ActionDone:
    return ActionDone(done="forgotten", name=await coordinator.volunteers.forget(ask.name))
