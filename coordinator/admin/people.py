"""Commands about volunteers and invites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.accounts.accounts import Shown
from coordinator.accounts.invites import InviteInfo, NewCode
from coordinator.admin.command import Ask, Command, Named, Nothing
from coordinator.database.statistics import Person
from shared.links import format_link

if TYPE_CHECKING:
    from coordinator.services import Coordinator


class CreateInvites(Ask, frozen=True, kw_only=True):
    """One invite for each name, or `count` of them."""

    names: tuple[str, ...] = ()
    count: int = 1
    uses: int = 1
    expires_s: float | None = None


class RevokeInvite(Ask, frozen=True, kw_only=True):
    id: int


class Rename(Ask, frozen=True, kw_only=True):
    name: str
    to: str


class Suspend(Ask, frozen=True, kw_only=True):
    name: str
    reason: str


class InviteLink(msgspec.Struct, frozen=True, kw_only=True):
    """An invite as it is handed out: the only time its code is seen."""

    id: int
    label: str
    link: str
    expires_at: float | None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Confirmation of an action: the verb, and the volunteer it was applied to."""

    done: str
    name: str


def _link(coordinator: Coordinator, code: NewCode) -> InviteLink:
    link = format_link(coordinator.server.link(code.code))
    return InviteLink(id=code.id, label=code.label, link=link, expires_at=code.expires_at)


async def invite_create(coordinator: Coordinator, ask: CreateInvites) -> tuple[InviteLink, ...]:
    made = await coordinator.volunteers.invites.create(
        ask.names, count=ask.count, uses=ask.uses, expires_s=ask.expires_s
    )
    return tuple(_link(coordinator, code) for code in made)


async def invite_list(coordinator: Coordinator, ask: Nothing) -> tuple[InviteInfo, ...]:
    return await coordinator.volunteers.invites.list()


async def invite_revoke(coordinator: Coordinator, ask: RevokeInvite) -> InviteInfo:
    return await coordinator.volunteers.invites.revoke(ask.id)


async def volunteer_list(coordinator: Coordinator, ask: Nothing) -> tuple[Person, ...]:
    return await coordinator.volunteers.list()


async def show(coordinator: Coordinator, ask: Named) -> Shown:
    return await coordinator.volunteers.show(ask.name)


async def ban(coordinator: Coordinator, ask: Named) -> Done:
    await coordinator.volunteers.ban(ask.name)
    return Done(done="banned", name=ask.name)


async def unban(coordinator: Coordinator, ask: Named) -> Done:
    await coordinator.volunteers.unban(ask.name)
    return Done(done="let in again", name=ask.name)


async def suspend(coordinator: Coordinator, ask: Suspend) -> Done:
    name = await coordinator.volunteers.suspend(ask.name, ask.reason)
    return Done(done="suspended", name=name)


async def vouch(coordinator: Coordinator, ask: Named) -> Done:
    return Done(done="vouched for", name=await coordinator.volunteers.vouch(ask.name))


async def rename(coordinator: Coordinator, ask: Rename) -> Done:
    name = await coordinator.volunteers.rename(ask.name, ask.to)
    return Done(done="renamed", name=name)


async def reissue(coordinator: Coordinator, ask: Named) -> InviteLink:
    return _link(coordinator, await coordinator.volunteers.reissue(ask.name))


async def forget(coordinator: Coordinator, ask: Named) -> Done:
    return Done(done="forgotten", name=await coordinator.volunteers.forget(ask.name))


COMMANDS = (
    Command(
        name="invite.create", request=CreateInvites, reply=tuple[InviteLink, ...], run=invite_create
    ),
    Command(
        name="invite.list",
        request=Nothing,
        reply=tuple[InviteInfo, ...],
        run=invite_list,
        needs="database",
    ),
    Command(
        name="invite.revoke",
        request=RevokeInvite,
        reply=InviteInfo,
        run=invite_revoke,
        needs="database",
    ),
    Command(
        name="volunteer.list",
        request=Nothing,
        reply=tuple[Person, ...],
        run=volunteer_list,
        needs="database",
    ),
    Command(name="volunteer.show", request=Named, reply=Shown, run=show, needs="database"),
    Command(name="volunteer.ban", request=Named, reply=Done, run=ban, needs="database"),
    Command(name="volunteer.unban", request=Named, reply=Done, run=unban, needs="database"),
    Command(name="volunteer.suspend", request=Suspend, reply=Done, run=suspend, needs="database"),
    Command(name="volunteer.vouch", request=Named, reply=Done, run=vouch, needs="database"),
    Command(name="volunteer.rename", request=Rename, reply=Done, run=rename, needs="database"),
    Command(name="volunteer.reissue", request=Named, reply=InviteLink, run=reissue),
    Command(name="volunteer.forget", request=Named, reply=Done, run=forget, needs="database"),
)
