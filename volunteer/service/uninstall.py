"""Uninstalling: release tasks, remove service, downloads and, if wanted, the account."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from shared.clock import Clock
from shared.errors import Configuration, Unreachable, VolunteerError, why
from shared.files.deletions import delete_empty_folder, delete_file, delete_folder
from shared.protocol import endpoints
from shared.protocol.accounts import LeaveRequest
from shared.protocol.leases import ReleaseRequest
from shared.sentences import Sentence, plural
from volunteer.account.instance_lock import ProfileAtWork, instance_lock
from volunteer.account.join import Connect
from volunteer.account.profile_directory import Identity, Profile
from volunteer.control import commands
from volunteer.control.local_socket import attach
from volunteer.i18n.catalogue import N_
from volunteer.net.api import ASK_S, SHORT_S, Api
from volunteer.settings.settings import Directories
from volunteer.storage.leases import Leases

END_S = 60.0  # time for a running volunteer to submit or release its tasks
PROBE_S = 0.2
# directories that are removed once they are empty
OWN_FOLDERS = ("volunteer", "profiles", "cache", "Cache")


class Belonging(msgspec.Struct, frozen=True, kw_only=True):
    """File or folder of the program on this machine, and whether to delete it."""

    what: str
    path: Path
    size: int  # bytes
    goes: bool


def belongings(
    directories: Directories, service: tuple[Path, ...], *, whole: bool
) -> tuple[Belonging, ...]:
    """Return this profile's files and folders; account and settings are deleted only with
    `whole`.

    Settings that other profiles use as well stay.
    """
    items = [Belonging(what=N_("service"), path=p, size=_size(p), goes=True) for p in service]
    items.append(_belonging(N_("downloads"), directories.cache, goes=True))
    profile = directories.profile
    labels = {"tasks": N_("half-done training"), "members": N_("copies of your own data")}
    listed = [
        _belonging(label, home / folder, goes=True)
        for folder, label in labels.items()
        for home in sorted(profile.glob("*/"))  # of any coordinator
    ]
    parts = [item for item in listed if item.size]
    items += parts
    inside = _size(profile) - sum(item.size for item in parts)
    label = N_("account, results not yet submitted")
    items.append(Belonging(what=label, path=profile, size=inside, goes=whole))
    settings = directories.config / "config.toml"
    alone = not other_profiles(directories)
    items.append(_belonging(N_("settings"), settings, goes=whole and alone))
    return tuple(item for item in items if item.path.exists())


def other_profiles(directories: Directories) -> tuple[str, ...]:
    """Return the names of the other profiles, which stay and use the same settings."""
    beside = directories.profile.parent
    names = (path.name for path in beside.iterdir() if path.is_dir() and path.name.count("@") == 1)
    return tuple(sorted(name for name in names if name != directories.profile.name))


async def release_tasks(profile: Profile, connect: Connect, clock: Clock) -> str:
    """Stop the running volunteer, which releases its tasks, or release the leases that an earlier
    volunteer stored; return a sentence about the result.

    Raises Configuration if the running volunteer does not end.
    """
    answered = False
    with suppress(Unreachable):  # no volunteer runs, or it is starting, ending or stuck
        async with attach(profile.endpoint, clock) as control:
            await control.do(commands.Stop(how="release"))
            answered = True
    await _wait_for_end(profile, clock)
    if answered:
        return Sentence("the running volunteer has ended and given its task back")
    try:
        identity = profile.current()
    except Configuration as error:
        return Sentence("no task was given back: {error}", error=error.message)
    if identity is None or not identity.registered:
        return Sentence("there was no task to give back")
    return await _release(profile, identity, connect)


async def _wait_for_end(profile: Profile, clock: Clock) -> None:
    until = clock.monotonic() + END_S
    while clock.monotonic() < until:
        try:
            with instance_lock(profile.path):
                return
        except ProfileAtWork:
            await clock.sleep(PROBE_S)
    raise Configuration(
        Sentence("the running volunteer does not end: stop it with `volunteer stop`")
    )


async def _release(profile: Profile, identity: Identity, connect: Connect) -> str:
    leases = Leases(profile.home(identity).tasks)
    client = connect(identity.address, identity.token)
    api, count = Api(client), 0
    try:
        for entry in leases.stored():
            request = ReleaseRequest(attempt=entry.lease.attempt, reason="uninstalled")
            try:
                task = {"task": entry.lease.task}
                await api.call(endpoints.RELEASE, task, request, patience_s=SHORT_S)
                count += 1
            except VolunteerError:
                pass  # the lease expires by itself
            leases.drop(entry.lease)
        # last: any later request would register this machine again
        await api.call(endpoints.LEAVE, body=LeaveRequest(), patience_s=ASK_S)
    except VolunteerError as error:
        return Sentence(
            "the coordinator was not notified ({error}); the leases expire by themselves",
            error=error.message,
        )
    finally:
        await client.close()
    if not count:
        return Sentence("no task was left to give back")
    return plural("{n} task given back", "{n} tasks given back", count)


def remove(items: tuple[Belonging, ...]) -> list[str]:
    """Delete the belongings marked for deletion, then the program's empty directories; return the
    failures.
    """
    trouble: list[str] = []
    for item in items:
        if not item.goes:
            continue
        try:
            if item.path.is_dir() and not item.path.is_symlink():
                delete_folder(item.path, "asked", strict=True)
            else:
                delete_file(item.path, "asked")
        except OSError as error:
            trouble.append(
                Sentence("{path} cannot be removed: {why}", path=item.path, why=why(error))
            )
        else:
            _prune(item.path.parent)
    return trouble


def _prune(place: Path) -> None:
    """Delete the program's own empty directories, innermost first."""
    while place.name in OWN_FOLDERS:
        try:
            delete_empty_folder(place, "asked")
        except OSError:
            return  # not empty
        place = place.parent


def _belonging(label: str, path: Path, *, goes: bool) -> Belonging:
    return Belonging(what=label, path=path, size=_size(path), goes=goes)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files below a directory, without following links."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for place, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(place) / name).lstat().st_size
            except OSError:
                continue  # deleted meanwhile
    return total
