"""Commands for the service, the nickname, updates, and removal. Parsing and printing only."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from shared.errors import BadRequest, Configuration, VolunteerError
from shared.programs.silence_watch import pause_watch
from shared.sentences import Sentence
from shared.text import printable
from volunteer.cli.data_commands import app as data
from volunteer.cli.exit_codes import ASKS_NOTHING, EXIT_FAILURE, confirm, remark, with_profile
from volunteer.cli.json_output import print_json
from volunteer.cli.options import Json, Profile, Yes
from volunteer.cli.prompt_commands import ask_account, call_account
from volunteer.cli.receipt_commands import app as receipts
from volunteer.i18n.catalogue import N_, _, translated

if TYPE_CHECKING:
    from shared.protocol.accounts import Me
    from volunteer.service.service_units import Service
    from volunteer.service.uninstall import Belonging
    from volunteer.settings.settings import Directories

MACHINE_UNIT = Path("/etc/systemd/system/volunteer.service")

System = Annotated[
    bool,
    Parameter(help="For the whole machine, under its own user (systemd).", negative=""),
]

service = App(name="service", help="Run the volunteer as a service, from log-in on.")


@service.command
def install(
    *,
    system: System = False,
    join: Annotated[
        str, Parameter(help="With --system: the link that the service joins with.")
    ] = "",
    show: Annotated[bool, Parameter(help="Only print what would be written.", negative="")] = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Install a service, start it, and print how to watch it."""
    from shared.network.links import parse_link

    if join and not system:
        raise BadRequest(
            Sentence("--join is for --system: your own service needs `volunteer join LINK` first")
        )
    if join:
        parse_link(join)
    service_files = _service_of(system, join, profile)
    paths = [str(file.path) for file in service_files.files]
    if show and json:
        return print_json({"files": paths, "written": False})
    if show:
        for file in service_files.files:
            print(f"# {file.path}")
            print(_("(secret)") if file.secret else _text(file.data))
        return 0
    from volunteer.service.service import install as carry_out

    carry_out(service_files)
    if json:
        return print_json({"files": paths, "written": True})
    for file in service_files.files:
        print(_("written: {path}", path=file.path))
    print(with_profile("\n".join(map(translated, service_files.hints)), profile))
    return 0


@service.command
def remove(*, system: System = False, json: Json = False, profile: Profile = "") -> int:
    """Stop the service and remove it."""
    from volunteer.service.service import remove as carry_out

    removed = carry_out(_service_of(system, "", profile, removing=True))
    if json:
        return print_json({"removed": removed})
    print(_("the service is removed") if removed else _("there was no service"))
    return 0


def name(
    *,
    public: Annotated[
        bool | None,
        Parameter(
            name="--show",
            negative="--hide",
            help="Show it to others on the leaderboard, or hide it.",
        ),
    ] = None,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Your nickname and its visibility to others."""
    from shared.protocol.accounts import VisibilityRequest
    from shared.protocol.endpoints import ME, VISIBILITY
    from volunteer.settings import settings

    if public is not None:
        call_account(profile, VISIBILITY, body=VisibilityRequest(public=public))
        # saved for the next coordinator too
        places = settings.directories(profile=profile)
        settings.save(places.config / "config.toml", {"public": public})
    me = call_account(profile, ME)
    if json:
        return print_json({"nickname": me.nickname, "public": me.public})
    nickname = printable(me.nickname)
    print(
        _('your nickname is "{name}"; others see it on the leaderboard', name=nickname)
        if me.public
        else _('your nickname is "{name}"; it is hidden from others', name=nickname)
    )
    return 0


def update(*, json: Json = False, profile: Profile = "") -> int:
    """Install the version that the coordinator runs with; go back if it does not start."""
    from volunteer.cli.start import identity_of
    from volunteer.service import self_update
    from volunteer.settings import settings

    public_key = identity_of(settings.directories(profile=profile)).public_key
    download = ask_account(profile, lambda api: self_update.fetch_update(api, public_key))
    if json:
        if download is not None:
            self_update.install_wheel(*download)
        return print_json({"installed": download is not None})
    if download is None:
        print(_("this is the version that the coordinator runs with"))
        return 0
    done = _("the new version is installed; a running volunteer uses the old one until it ends")
    self_update.install_wheel(*download)
    print(done)
    return 0


Hide = Annotated[bool, Parameter(help="Take your nickname off the leaderboard first.", negative="")]


def uninstall(
    *,
    all_: Annotated[
        bool,
        Parameter(name="--all", help="Remove the account and the settings too.", negative=""),
    ] = False,
    hide: Hide = False,
    yes: Yes = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Give tasks back, remove service and downloads; the account stays unless --all."""
    from shared.programs.installation import removal_line
    from volunteer.service.service import remove as remove_service
    from volunteer.service.uninstall import belongings
    from volunteer.settings.settings import directories

    places = directories(profile=profile)
    service_files = _installed_service(profile)
    files = tuple(f.path for f in service_files.files if f.path.exists()) if service_files else ()
    items = belongings(places, files, whole=all_)
    if not _confirm_removal(
        items, places, RemovalOptions(account=all_, hide=hide, yes=yes, json=json)
    ):
        print(_("nothing was changed"))
        return EXIT_FAILURE
    if service_files and files:
        remove_service(service_files)
    failures = _remove(items, places, hide=hide, json=json)
    if not json:
        _print_remains(removal_line())
    return EXIT_FAILURE if failures else 0


def _print_remains(command: str) -> None:
    """Print the parts of the program that remain, and the command that removes it."""
    if MACHINE_UNIT.exists():
        print(_("a service of the whole machine remains: `sudo volunteer service remove --system`"))
    print(_("remove the program itself: `{command}`", command=command))


def leave(
    *,
    hide: Hide = False,
    yes: Yes = False,
    json: Json = False,
    profile: Profile = "",
) -> int:
    """Leave the coordinator: give tasks back and remove the account here; the program stays."""
    from volunteer.service.uninstall import belongings
    from volunteer.settings.settings import directories

    places = directories(profile=profile)
    items = tuple(
        item
        for item in belongings(places, (), whole=True)
        if item.path.is_relative_to(places.profile)
    )
    if not _confirm_removal(
        items, places, RemovalOptions(account=True, hide=hide, yes=yes, json=json)
    ):
        print(_("nothing was changed"))
        return EXIT_FAILURE
    return EXIT_FAILURE if _remove(items, places, hide=hide, json=json) else 0


@dataclass(frozen=True, kw_only=True)
class RemovalOptions:
    """Options of a command that removes files of the program, and perhaps the account."""

    account: bool
    hide: bool
    yes: bool
    json: bool


def _confirm_removal(
    items: tuple[Belonging, ...], places: Directories, options: RemovalOptions
) -> bool:
    """Print the files that go or stay, and the fate of the account; return True if the person
    agrees. Raises BadRequest for JSON without `yes`.
    """
    if options.json:
        if not options.yes:
            raise BadRequest(ASKS_NOTHING)
        return True
    _print_belongings(items, places)
    if options.account and (me := _account(places)) is not None:
        for sentence in farewell_lines(me, hide=options.hide):
            print(sentence)
    return options.yes or _ask_removal()


def _account(places: Directories) -> Me | None:
    """Return the account as the coordinator sees it; None if the coordinator does not answer, or
    refuses.
    """
    from shared.protocol.endpoints import ME
    from volunteer.cli.start import ask_coordinator
    from volunteer.net.api import SHORT_S

    try:
        me: Me = asyncio.run(ask_coordinator(places, lambda api: api.call(ME, patience_s=SHORT_S)))
    except VolunteerError:
        return None
    return me


def farewell_lines(me: Me, *, hide: bool) -> list[str]:
    """Return the fate of an account whose secret is removed from this machine, as lines."""
    from volunteer.i18n.formats import credit

    lines = [
        _(
            '"{name}" and its {credits} credits stay at the coordinator, and this machine can no '
            "longer use them: `volunteer link` before joins another machine to the account",
            name=printable(me.nickname),
            credits=credit(me.earned_micro),
        )
    ]
    if me.public and not hide:
        lines.append(_("the nickname stays on the leaderboard: --hide takes it off"))
    lines.append(_("only the organiser can forget the account: ask for it"))
    return lines


def _remove(
    items: tuple[Belonging, ...], places: Directories, *, hide: bool, json: bool
) -> list[str]:
    """Hand tasks back and remove the files; return the failures."""
    from shared.clock import SystemClock
    from shared.protocol.accounts import VisibilityRequest
    from shared.protocol.endpoints import VISIBILITY
    from volunteer.account.join import connector
    from volunteer.account.profile_directory import Profile as ProfileDirectory
    from volunteer.cli.start import ask_coordinator
    from volunteer.service.uninstall import release_tasks
    from volunteer.service.uninstall import remove as remove_files

    if hide:
        request = VisibilityRequest(public=False)
        asyncio.run(ask_coordinator(places, lambda api: api.call(VISIBILITY, body=request)))
    clock = SystemClock()
    tasks_line = translated(
        asyncio.run(release_tasks(ProfileDirectory(places.profile), connector(clock), clock))
    )
    failures = remove_files(items)
    if json:
        paths = [str(item.path) for item in items if item.goes]
        print_json({"removed": paths, "tasks": tasks_line, "trouble": list(map(str, failures))})
        return failures
    print(tasks_line)
    for sentence in failures:
        remark(translated(sentence))
    return failures


def logs(*, profile: Profile = "") -> int:
    """Follow the log of the service, until Ctrl-C."""
    service_files = _installed_service(profile)
    if service_files is None or not any(file.path.exists() for file in service_files.files):
        raise Configuration(
            Sentence(
                "no service is installed: `volunteer service install`; a volunteer without one "
                "writes to its own terminal"
            )
        )
    if not service_files.log:
        raise Configuration(Sentence("the service writes to its window"))
    remark(_("following the log of the service, until Ctrl-C; lines come as it writes them"))
    with pause_watch():
        return subprocess.call(service_files.log)


def add_to(app: App) -> None:
    """Add these commands to the program."""
    app.command(service)
    app.command(name)
    app.command(update)
    app.command(uninstall)
    app.command(leave)
    app.command(logs)
    app.command(receipts)
    app.command(data)


def _service_of(system: bool, join: str, profile: str, *, removing: bool = False) -> Service:
    from volunteer.service.service import target_here
    from volunteer.service.service_units import describe

    target = target_here(
        profile=profile, machine=system, join=join, environ=os.environ, removing=removing
    )
    return describe(target)


def _installed_service(profile: str) -> Service | None:
    """Return the service of this profile; None on a system without services."""
    from shared.errors import Configuration

    try:
        return _service_of(False, "", profile, removing=True)
    except Configuration:
        return None


def _print_belongings(items: tuple[Belonging, ...], places: Directories) -> None:
    """Print the files and folders of the program, and which of them are deleted."""
    from shared.text import left
    from volunteer.i18n.formats import size
    from volunteer.service.uninstall import other_profiles

    for item in items:
        word = left(_("goes") if item.goes else _("stays"), 6)
        print(f"{word} {size(item.size):>8}  {item.path}  ({_(item.what)})")
    for name in other_profiles(places):
        print(f"{left(_('stays'), 6)} {'':>8}  {_('another profile: {name}', name=name)}")


def _ask_removal() -> bool:
    if sys.stdin.isatty():
        return confirm(N_('Remove everything marked "goes"?'))
    remark(_("no terminal to confirm in: add --yes"))
    return False


def _text(data: bytes) -> str:
    return data.decode("utf-16") if data[:2] in (b"\xff\xfe", b"\xfe\xff") else data.decode()
