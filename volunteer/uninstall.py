"""Leaving a machine as it was: what there is, handing tasks back, and removing service, downloads and, if wanted, the account."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import msgspec

from shared.clock import SystemClock
from shared.errors import Configuration, Unreachable, VolunteerError
from shared.protocol import LeaveRequest, ReleaseRequest
from volunteer.api import Api
from volunteer.channel import attach
from volunteer.config import Directories
from volunteer.joining import connector
from volunteer.leases import Leases
from volunteer.profile import Identity, Profile
from volunteer.tls import Address

END_S = 60.0  # for a running volunteer to hand in or give back what it has
PROBE_S = 0.2


class Belonging(msgspec.Struct, frozen=True, kw_only=True):
    """Something on this machine that is ours, and whether it goes."""

    what: str
    path: Path
    size: int
    goes: bool


def belongings(
    directories: Directories, service: tuple[Path, ...], *, everything: bool
) -> tuple[Belonging, ...]:
    """What there is of this profile; the account and the settings only go with `everything`."""
    found = [Belonging(what="service", path=p, size=_size(p), goes=True) for p in service]
    found.append(_belonging("downloads that can be made again", directories.cache, goes=True))
    profile = directories.profile
    practice = profile / "practice"
    found.append(_belonging("the practice run", practice, goes=True))
    inside = _size(profile) - _size(practice)
    what = "account, results not yet handed in, half-done tasks"
    found.append(Belonging(what=what, path=profile, size=inside, goes=everything))
    found.append(_belonging("settings", directories.config / "config.toml", goes=everything))
    return tuple(item for item in found if item.path.exists())


async def hand_back(profile: Profile) -> str:
    """End the running volunteer, or give back what an earlier one still holds. Says what happened."""
    try:
        async with attach(profile.endpoint, SystemClock()) as control:
            await control.stop("release")
        await _ended(profile)
        return "the running volunteer has ended and given its task back"
    except Unreachable:
        pass  # none is running
    identity = profile.current()
    if identity is None or not identity.registered:
        return "there was no task to give back"
    return await _release(profile, identity)


async def _ended(profile: Profile) -> None:
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        try:
            with profile.lock():
                return
        except Configuration:
            await asyncio.sleep(PROBE_S)
    raise Configuration("the running volunteer does not end: stop it with `volunteer stop`")


async def _release(profile: Profile, identity: Identity) -> str:
    leases = Leases(profile.home(identity).tasks)
    address = Address(url=identity.url, tls_pin=identity.tls_pin)
    client = connector(SystemClock())(address, identity.token)
    api, given = Api(client), 0
    try:
        for held in leases.stored():
            request = ReleaseRequest(attempt=held.lease.attempt, reason="uninstalled")
            try:
                await api.release(held.lease.task, request)
                given += 1
            except VolunteerError:
                pass  # it runs out by itself
            leases.drop(held.lease)
        await api.leave(LeaveRequest())
    except VolunteerError as error:
        return f"the coordinator was not told ({error.message}); what it lent runs out by itself"
    finally:
        await client.close()
    return f"{given} task{'' if given == 1 else 's'} given back"


def remove(items: tuple[Belonging, ...]) -> list[str]:
    """Delete what goes; what could not be deleted is told."""
    trouble = []
    for item in items:
        if not item.goes:
            continue
        try:
            if item.path.is_dir() and not item.path.is_symlink():
                shutil.rmtree(item.path)
            else:
                item.path.unlink(missing_ok=True)
        except OSError as error:
            trouble.append(f"{item.path} could not be removed: {error.strerror}")
    return trouble


def _belonging(what: str, path: Path, *, goes: bool) -> Belonging:
    return Belonging(what=what, path=path, size=_size(path), goes=goes)


def _size(path: Path) -> int:
    """Bytes of a file or of all files below a directory; links are not followed."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(place) / name).lstat().st_size
            except OSError:
                continue  # it went away meanwhile
    return total
