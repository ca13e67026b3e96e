"""`volunteer update`: the newest release as the coordinator announces it; nothing is fetched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from cyclopts import Parameter

from volunteer.cli.exit_codes import EXIT_FAILURE, remark
from volunteer.cli.json_output import print_json
from volunteer.i18n.catalogue import _, shown

if TYPE_CHECKING:
    from shared.protocol.accounts import Release, ServerInfo
    from volunteer.net.api import Api

PATIENCE_S = 15.0


class Announced(NamedTuple):
    """The announced release as JSON."""

    own: str
    version: str = ""
    sha256: str = ""
    newer: bool = False
    checked: bool | None = None  # the file given to --check is the announced one


def update(
    *,
    check: Annotated[Path | None, Parameter(help="Compare a file with the announced hash.")] = None,
    json: Annotated[bool, Parameter(help="As JSON, for machines.", negative="")] = False,
    profile: Annotated[str, Parameter(help="Profile on this host.")] = "",
) -> int:
    """Say which version the coordinator announces, and how to check and install it."""
    from volunteer.account.join import software
    from volunteer.account.profile import Profile as ProfileDirectory
    from volunteer.account.releases import announced, check_file, is_newer, steps
    from volunteer.cli.start import ask_coordinator
    from volunteer.settings.settings import directories

    places = directories(profile=profile)

    async def ask(api: Api) -> ServerInfo:
        return await api.server(PATIENCE_S)

    server = asyncio.run(ask_coordinator(places, ask))
    who = ProfileDirectory(places.profile).current()
    assert who is not None  # ask_coordinator has used it
    found, own = announced(server.release, who.public_key), software()
    checked = check_file(found, check) if found is not None and check is not None else None
    if json:
        told = Announced(own=own, checked=checked)
        if found is not None:
            newer = is_newer(found.version, own)
            told = told._replace(version=found.version, sha256=found.sha256, newer=newer)
        print_json(told._asdict())
    elif found is None:
        print(_("this is version {own}; the coordinator announces none", own=own))
    elif checked is not None:
        _compared(found, check, same=checked)
    elif not is_newer(found.version, own):
        said = _(
            "this is version {own}; {version} is announced: nothing to do",
            own=own,
            version=found.version,
        )
        print(said)
    else:
        _told(found, own, steps(found))
    return EXIT_FAILURE if checked is False or (check is not None and found is None) else 0


def _compared(found: Release, file: Path | None, *, same: bool) -> None:
    """Say on standard output that a file is the announced one, else on standard error."""
    told: dict[str, object] = {"file": file, "version": found.version}
    if same:
        print(_("{file} is version {version}, as the coordinator announced it", **told))
        return
    remark(_("{file} is not the announced file of version {version}: do not install it", **told))


def _told(found: Release, own: str, steps: tuple[tuple[str, str], ...]) -> None:
    from shared.text import left

    version = found.version
    print(_("version {version} is announced and signed; this is {own}", version=version, own=own))
    rows = [("sha256", found.sha256), *((shown(name), command) for name, command in steps)]
    for name, text in rows:
        print(f"  {left(name, 12)} {text}")
