"""team: found one, join one by its code, leave it, see how it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from volunteer.cli.json_output import print_json
from volunteer.cli.prompt_commands import Json, Profile, ask_account
from volunteer.i18n.catalogue import _, ngettext

if TYPE_CHECKING:
    from shared.protocol.teams import MyTeam

app = App(name="team", help="Your team: found one, join, leave, show.")


@app.command
def create(
    name: Annotated[str, Parameter(help="Its name, by the rules of nicknames.")],
    *,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Found a team, once a contribution of yours was merged; you are in it."""
    from shared.protocol.teams import TeamCreate

    return _told(
        ask_account(profile, lambda api: api.create_team(TeamCreate(name=name))), json=json
    )


@app.command
def join(
    code: Annotated[str, Parameter(help="The code that a member has.")],
    *,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Join a team by its code. What you earn from now on counts for it too."""
    from shared.protocol.teams import TeamJoin

    return _told(ask_account(profile, lambda api: api.join_team(TeamJoin(code=code))), json=json)


@app.command
def leave(*, json: Json = False, profile: Profile = "") -> int:
    """Leave your team. What you earned for it stays with it; your credits are yours."""
    from shared.protocol.teams import MyTeam

    ask_account(profile, lambda api: api.leave_team())
    return _told(MyTeam(), json=json)


@app.command
def show(*, json: Json = False, profile: Profile = "") -> int:
    """Your team: its place, its members, and the code that lets others in."""
    return _told(ask_account(profile, lambda api: api.team()), json=json)


def _told(team: MyTeam, *, json: bool) -> int:
    from shared.text import left, printable
    from volunteer.i18n.formats import credit

    if json:
        return print_json(team)
    if not team.name:
        print(_("you are in no team: `volunteer team join CODE`, or `volunteer team create NAME`"))
        return 0
    print(printable(team.name, 64))
    place = (
        _("place {rank} of {teams}", rank=team.rank, teams=team.teams)
        if team.rank
        else _("no place yet")
    )
    earned, mine = credit(team.earned_micro), credit(team.mine_micro)
    print(f"  {place}, {_('{earned} credits, {mine} of them yours', earned=earned, mine=mine)}")
    print(f"  {_('`volunteer team join {code}` lets others in', code=team.code)}")
    for member in team.members:
        you = f" ({_('you')})" if member.me else ""
        print(
            f"  {left(printable(member.nickname, 40) + you, 32)} {credit(member.earned_micro):>14}"
        )
    hidden = team.size - len(team.members)
    if hidden > 0:
        print(f"  {ngettext('and {n} member more', 'and {n} members more', hidden)}")
    return 0


def add_to(parent: App) -> None:
    parent.command(app)
