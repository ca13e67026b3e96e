"""`volunteer update`: the newest release as the coordinator announces it; nothing is fetched."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from cyclopts import Parameter

from volunteer.cli.json_output import print_json

if TYPE_CHECKING:
    from shared.protocol.accounts import ServerInfo
    from volunteer.net.api import Api

EXIT_FAILURE = 1
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
        print(f"this is version {own}; the coordinator announces none")
    elif checked is not None:
        same = f"{check} is version {found.version}, as the coordinator announced it"
        other = f"{check} is not the announced file of version {found.version}: do not install it"
        print(same if checked else other, file=sys.stdout if checked else sys.stderr)
    elif not is_newer(found.version, own):
        print(f"this is version {own}; {found.version} is announced: nothing to do")
    else:
        print(f"version {found.version} is announced and signed; this is {own}")
        print(f"  {'sha256':<8}{found.sha256}")
        for name, command in steps(found):
            print(f"  {name:<8}{command}")
    return EXIT_FAILURE if checked is False or (check is not None and found is None) else 0
