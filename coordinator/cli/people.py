"""The commands `invite`, `volunteer` and `contribution`: admission of people, their accounts and
their pay.
"""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from coordinator.admin.command import EmptyRequest, NameRequest, NumberRequest, ReasonedRequest
from coordinator.cli.listing import as_json, facts, table, when, write_csv
from coordinator.cli.runs import Yes, preview
from coordinator.cli.target import HERE, TargetOptions, call, listed, tell
from coordinator.rules.standing import PROOFS_MIN
from shared.errors import BadRequest, why
from shared.files.text_file import read_text
from shared.network.qr import qr_coloured
from shared.text import MICRO, credit, exact_credit
from shared.units import DAY_S

if TYPE_CHECKING:
    from coordinator.accounts.organiser_reversals import Reversal
    from coordinator.admin.people_commands import ActionDone, BanDone, InviteLink
    from coordinator.database.statistics import VolunteerSummary

NAMES_MAX = 1000
GRANT_MAX = 1e9  # largest grant in credits
STANDINGS = ("vetted", "probation", "suspended")

invites = App(name="invite", help="Invites: links that let people in.")
volunteers = App(name="volunteer", help="Volunteers: list, ban, suspend, reverse, rename, forget.")
contributions = App(name="contribution", help="Contributions: take back what was paid for one.")

Who = Annotated[str, Parameter(help="Nickname or id.")]
Why = Annotated[str, Parameter(help="The reason, for the record and for its owner.")]


@invites.command
def create(
    *,
    names: Annotated[
        Path | None, Parameter(help="A file with one name per line, or a CSV: one invite each.")
    ] = None,
    count: Annotated[
        int | None, Parameter(help="Number of invites, without --names (default: 1).")
    ] = None,
    uses: Annotated[int, Parameter(help="Number of people one invite lets in.")] = 1,
    days: Annotated[
        float | None, Parameter(help="Valid this long (default: until revoked).")
    ] = None,
    qr: Annotated[
        bool, Parameter(help="Show each link as a QR code too; without --names.", negative="")
    ] = False,
    where: TargetOptions = HERE,
) -> None:
    """Make join links. Each is shown once: only its hash is kept."""
    from coordinator.admin import people_commands as commands

    if names is not None and (qr or count is not None):
        raise BadRequest("--names makes one invite a name: leave --count and --qr out")
    if qr and where.json:
        raise BadRequest("--json prints no QR code: leave --qr out")
    request = commands.CreateInvites(
        names=() if names is None else tuple(_names(names)),
        count=1 if count is None else count,
        uses=uses,
        expires_s=None if days is None else days * DAY_S,
    )
    invites = call(where, commands.invite_create, request)
    if where.json:
        as_json(invites)
    elif names is None:
        for invite in invites:
            print(invite.link)
            if qr:
                print(qr_coloured(invite.link))
    else:
        write_csv([{"name": i.label, "link": i.link} for i in invites], ["name", "link"])
    if not where.json:
        print("\n".join(_beside(invites[0])), file=sys.stderr)


def _beside(invite: InviteLink) -> list[str]:
    """Return the lines for the organiser about the first link."""
    if invite.message:
        return ["", "To send with the link:", *(f"  {line}" for line in invite.message)]
    return [
        "This link leads to the machine on which it is opened: only people at this machine can "
        "join by it. `coordinator serve --host 0.0.0.0` first, then make invites.",
    ]


def _names(file: Path) -> list[str]:
    """Return the names in a CSV file: its column headed "name", or else its first column. Raises
    BadRequest.
    """
    try:
        rows = list(csv.reader(read_text(file.expanduser()).splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadRequest(f"the list of names {file} cannot be read: {why(error)}") from error
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    column = 0
    if rows:
        heads = [cell.strip().lower() for cell in rows[0]]
        if "name" in heads:
            column, rows = heads.index("name"), rows[1:]
    names = [row[column].strip() for row in rows if len(row) > column and row[column].strip()]
    if not 1 <= len(names) <= NAMES_MAX:
        raise BadRequest(f"{file} must hold between 1 and {NAMES_MAX} names, not {len(names)}")
    return names


@invites.command(name="list")
def invite_list(*, where: TargetOptions = HERE) -> None:
    """Every invite, without its code."""
    from coordinator.admin import people_commands as commands

    listed(
        where,
        commands.invite_list,
        EmptyRequest(),
        {
            "id": lambda i: i.id,
            "for": lambda i: i.label,
            "state": lambda i: i.state,
            "uses left": lambda i: i.uses_left,
            "joined": lambda i: ", ".join(i.joined),
            "made": lambda i: when(i.created_at),
            "expires": lambda i: when(i.expires_at),
        },
        "No invite yet: `coordinator invite create`",
    )


@invites.command
def revoke(
    id: Annotated[int, Parameter(help="Number of the invite.")],
    *,
    where: TargetOptions = HERE,
) -> None:
    """Withdraw an invite; accounts made with it stay."""
    from coordinator.admin import people_commands as commands

    request = NumberRequest(id=id)
    tell(where, commands.invite_revoke, request, lambda i: f"Invite {i.id} is {i.state}.")


@volunteers.command(name="list")
def volunteer_list(*, where: TargetOptions = HERE) -> None:
    """Every account."""
    from coordinator.admin import people_commands as commands

    listed(
        where,
        commands.volunteer_list,
        EmptyRequest(),
        {
            "nickname": lambda p: p.nickname,
            "state": lambda p: p.state,
            "machines": lambda p: p.machines,
            "last seen": lambda p: when(p.last_seen),
            "accepted": lambda p: p.work.accepted,
            "rejected": lambda p: p.work.refused,
            "credits": lambda p: credit(p.earned_micro),
            "id": lambda p: p.volunteer_id,
        },
        "No volunteer yet.",
    )


def trust(*, where: TargetOptions = HERE) -> None:
    """List standings and draws of all accounts, and the recomputes that wait."""
    from coordinator.admin import people_commands as commands

    report = call(where, commands.trust, EmptyRequest())
    if where.json:
        as_json(report)
        return
    counts = [f"{report.standings.get(name, 0)} {name}" for name in STANDINGS]
    facts(
        [
            ("accounts", ", ".join(counts)),
            ("draws", report.drawn.words),
            ("to be done again", report.backlog.words),
        ]
    )
    for reason, count in report.backlog.reasons:
        print(f"  {count} wait: {reason}")
    print()
    table(
        report.accounts,
        {
            "nickname": lambda a: a.nickname,
            "standing": lambda a: f"{a.standing}{', vouched for' if a.invited else ''}",
            "accepted": lambda a: a.accepted,
            "proofs": lambda a: a.proofs,
            "draws": lambda a: a.drawn.words or "none",
            "at stake": lambda a: credit(a.stake_micro),
            "why": lambda a: a.reason,
        },
        "No volunteer yet.",
    )


def grant(
    name: Who,
    amount: Annotated[float, Parameter(help="Credits.")],
    *,
    reason: Why,
    where: TargetOptions = HERE,
) -> None:
    """Give an account credits to spend, from the organiser's account."""
    if not 0 < amount <= GRANT_MAX:
        raise BadRequest(f"a grant must be above 0 and at most {GRANT_MAX:,.0f} credits")
    from coordinator.admin import people_commands as commands

    request = commands.CreditGrant(name=name, amount_micro=round(amount * MICRO), reason=reason)
    tell(
        where,
        commands.grant,
        request,
        lambda g: f"{g.name} got {exact_credit(g.amount_micro)} credits.",
    )


@volunteers.command
def show(name: Who, *, where: TargetOptions = HERE) -> None:
    """One account with its machines."""
    from coordinator.admin import people_commands as commands

    details = call(where, commands.show, NameRequest(name=name))
    if where.json:
        as_json(details)
        return
    person = details.person
    facts(
        [
            ("nickname", person.nickname),
            ("id", person.volunteer_id),
            ("invited as", person.label),
            ("state", person.state),
            ("standing", _standing(person)),
            ("first seen", when(person.first_seen)),
            ("last seen", when(person.last_seen)),
            ("accepted", person.work.accepted),
            ("rejected", person.work.refused),
            (
                "credits",
                f"{credit(person.earned_micro)} ({credit(person.pending_micro)} pending"
                f"{f', {credit(person.escrow_micro)} in escrow' if person.escrow_micro else ''}"
                f"{f', {credit(person.debt_micro)} owed' if person.debt_micro else ''})",
            ),
        ]
    )
    print()
    table(
        details.machines,
        {
            "machine": lambda w: w.hostname or w.worker_id[:8],
            "state": lambda w: w.state,
            "device": lambda w: w.device,
            "run": lambda w: w.run,
            "steps/s": lambda w: "" if w.rate is None else f"{w.rate:.3g}",
            "°C": lambda w: "" if w.celsius is None else f"{w.celsius:.0f}",
            "last seen": lambda w: when(w.last_seen),
        },
        "No machine.",
    )


def _standing(person: VolunteerSummary) -> str:
    """Return the standing of an account in a few words."""
    if person.standing == "probation":
        return f"on probation, {person.proofs} of {PROOFS_MIN} draws passed"
    return f"suspended: {person.reason}" if person.standing == "suspended" else person.standing


def _done(action: ActionDone) -> str:
    return f"{action.name} is {action.done}."


def _banned(ban: BanDone) -> str:
    reversed_pay = "" if ban.reversal is None else f"\n{_taken(ban.reversal)}"
    return f"{ban.name} is {ban.done}.{reversed_pay}"


@volunteers.command
def ban(
    name: Who,
    *,
    reverse: Annotated[
        bool, Parameter(help="Suspend it too, and take all of its credits back.", negative="")
    ] = False,
    reason: Why = "",
    where: TargetOptions = HERE,
) -> None:
    """Refuse an account from now on; its credits stay, unless they are reversed."""
    from coordinator.admin import people_commands as commands

    tell(where, commands.ban, commands.Ban(name=name, reverse=reverse, reason=reason), _banned)


@volunteers.command(name="reverse")
def reverse_volunteer(
    name: Who,
    *,
    since: Annotated[datetime, Parameter(help="Work submitted from this instant on, UTC.")],
    reason: Why,
    where: TargetOptions = HERE,
) -> None:
    """Reverse an account's pay for the work since a time; credits already spent become a debt."""
    from coordinator.admin import people_commands as commands

    at = since if since.tzinfo else since.replace(tzinfo=UTC)
    request = commands.Reverse(name=name, since=at.timestamp(), reason=reason)
    tell(where, commands.reverse, request, _taken)


@contributions.command(name="reverse")
def reverse_contribution(
    id: Annotated[int, Parameter(help="Number of the contribution.")],
    *,
    reason: Why,
    where: TargetOptions = HERE,
) -> None:
    """Reverse the pay of one contribution; credits already spent become its owner's debt."""
    from coordinator.admin import people_commands as commands

    request = commands.ReverseContribution(id=id, reason=reason)
    tell(where, commands.reverse_contribution, request, _taken)


def _taken(reversal: Reversal) -> str:
    """Summarise a reversal in one line."""
    totals = reversal.taken
    if not totals.contributions:
        return f"Nothing was left to take back from {reversal.name}."
    places = [
        f"{credit(micro)} {where}"
        for micro, where in (
            (totals.pending_micro, "pending"),
            (totals.escrow_micro, "in escrow"),
            (totals.earned_micro, "earned"),
        )
        if micro
    ]
    owed = f"; {credit(totals.debt_micro)} of it was spent and is owed now" * bool(
        totals.debt_micro
    )
    noun = "contribution" + "s" * (totals.contributions != 1)
    total = ", ".join(places) or "no credits"
    return f"{totals.contributions} {noun} of {reversal.name} reversed: {total}{owed}."


@volunteers.command
def key(
    name: Who,
    *,
    days: Annotated[float | None, Parameter(help="Valid this long (default: no end).")] = None,
    where: TargetOptions = HERE,
) -> None:
    """Make a key for your own programs: it asks every run, free and without limits by credits."""
    from coordinator.admin import people_commands as commands

    expires_s = None if days is None else days * DAY_S
    request = commands.NewOrganiserKey(name=name, expires_s=expires_s)
    tell(where, commands.organiser_key, request, lambda key: key.key)


@volunteers.command
def unban(name: Who, *, where: TargetOptions = HERE) -> None:
    """Let a banned account in again."""
    from coordinator.admin import people_commands as commands

    tell(where, commands.unban, NameRequest(name=name), _done)


@volunteers.command
def suspend(
    name: Who,
    *,
    reason: Annotated[str, Parameter(help="The reason, which the owner of the account reads.")],
    where: TargetOptions = HERE,
) -> None:
    """Give an account no work and no pay from now on; its pay in escrow is forfeit."""
    from coordinator.admin import people_commands as commands

    tell(where, commands.suspend, ReasonedRequest(name=name, reason=reason), _done)


@volunteers.command
def unsuspend(name: Who, *, reason: Why, where: TargetOptions = HERE) -> None:
    """Let a suspended account work again; forfeited pay stays forfeit."""
    from coordinator.admin import people_commands as commands

    tell(where, commands.unsuspend, ReasonedRequest(name=name, reason=reason), _done)


@volunteers.command
def vouch(name: Who, *, where: TargetOptions = HERE) -> None:
    """Treat an account as an invited one: vetted, and paid at once. Lifts a suspension."""
    from coordinator.admin import people_commands as commands

    tell(where, commands.vouch, NameRequest(name=name), _done)


@volunteers.command
def rename(
    name: Who,
    to: Annotated[str, Parameter(help="The new nickname.")],
    *,
    where: TargetOptions = HERE,
) -> None:
    """Give an account another nickname."""
    from coordinator.admin import people_commands as commands

    tell(where, commands.rename, commands.Rename(name=name, to=to), _done)


@volunteers.command
def reissue(name: Who, *, where: TargetOptions = HERE) -> None:
    """Revoke all secrets of an account and print a link that lets its owner in again."""
    from coordinator.admin import people_commands as commands

    tell(where, commands.reissue, NameRequest(name=name), lambda invite: invite.link)


@volunteers.command
def forget(name: Who, *, yes: Yes = False, where: TargetOptions = HERE) -> int:
    """Delete the identity of an account; its credits and contributions still count. Without --yes
    nothing is done.
    """
    from coordinator.admin import people_commands as commands

    if not yes:
        call(where, commands.show, NameRequest(name=name))
        return preview(f"the identity of {name} would be deleted, for good", where.json)
    tell(where, commands.forget, NameRequest(name=name), _done)
    return 0


def announce(
    text: Annotated[str, Parameter(help="The sentence; without it, list what is shown.")] = "",
    *,
    run: Annotated[str, Parameter(help="Run that the sentence is about.")] = "",
    until: Annotated[
        datetime | None, Parameter(help="Shown until this time, UTC (default: until withdrawn).")
    ] = None,
    withdraw: Annotated[
        int | None, Parameter(help="Number of the announcement to withdraw.")
    ] = None,
    where: TargetOptions = HERE,
) -> None:
    """Tell every volunteer a sentence, shown until it is read: in the program, in `volunteer
    status` and by `volunteer --no-ui`.
    """
    from coordinator.admin import people_commands as commands

    if withdraw is not None and text:
        raise BadRequest("give a sentence to announce, or --withdraw with a number")
    if not text and (run or until):
        raise BadRequest("--run and --until are for a new sentence: give its text")
    if text:
        at = None if until is None else (until if until.tzinfo else until.replace(tzinfo=UTC))
        news = commands.Announce(text=text, run=run, until=None if at is None else at.timestamp())
        moment = "volunteers see it within a minute"
        tell(where, commands.announce, news, lambda a: f"Announcement {a.id}: {moment}.")
    elif withdraw is not None:
        sentence = "Announcement {0.id} is withdrawn: {0.text}".format
        tell(where, commands.announce_withdraw, NumberRequest(id=withdraw), sentence)
    else:
        listed(
            where,
            commands.announce_list,
            EmptyRequest(),
            {
                "id": lambda a: a.id,
                "text": lambda a: a.text,
                "run": lambda a: a.run or "all",
                "made": lambda a: when(a.at),
                "until": lambda a: when(a.until),
            },
            'Nothing is announced: `coordinator announce "..."`',
        )


def add_to(parent: App) -> None:
    parent.command(invites)
    parent.command(volunteers)
    parent.command(contributions)
    parent.command(trust)
    parent.command(grant)
    parent.command(announce)
