"""The commands `top`, `check`, `backup`, `restore` and `alerts`: watch, verify and save a
coordinator.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter

from coordinator.admin.command import EmptyRequest
from coordinator.cli.listing import as_json, breach_state, table, when
from coordinator.cli.runs import Json
from coordinator.cli.target import HERE, TargetOptions, Where, call, connected, listed
from shared.errors import BadRequest, Configuration, Unavailable
from shared.programs.silence_watch import pause_watch
from shared.text import size

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from coordinator.config import Settings
    from coordinator.upkeep.backup import BackupSummary
    from coordinator.upkeep.backup_series import DrillReport
    from coordinator.upkeep.stored_backups import StoredBackups

NICENESS = 15  # priority of a backup, low so that submissions come first
SCHEME = "s3://"  # begins the address of a store, in place of a folder
T = TypeVar("T")

alerts = App(name="alerts", help="Alerts to the organiser: list those that last, test the webhook.")


@alerts.command(name="list")
def list_alerts(*, where: TargetOptions = HERE) -> None:
    """List the alerts that were sent and whose cause still lasts."""
    from coordinator.admin import upkeep_commands as commands

    listed(
        where,
        commands.alerts_list,
        EmptyRequest(),
        {
            "kind": lambda a: a.kind,
            "about": lambda a: a.about,
            "since": lambda a: when(a.since),
            "seen": lambda a: when(a.seen_at),
            "message": lambda a: a.message,
        },
        "All is well.",
    )


@alerts.command(name="test")
def try_alerts(*, where: TargetOptions = HERE) -> int:
    """Send a test to the webhook. Exit code 1 where it did not arrive."""
    from coordinator.admin import upkeep_commands as commands

    result = call(where, commands.alerts_test, EmptyRequest())
    if where.json:
        as_json(result)
    else:
        print(result.problem or "sent")
    return 1 if result.problem else 0


def settings(*, where: TargetOptions = HERE) -> None:
    """Every setting, its value, and the source of the value, on this machine."""
    from coordinator.config import setting_rows

    if where.remote:
        raise BadRequest(
            "`coordinator settings` shows the settings of this machine: leave --server out"
        )
    rows = setting_rows(where.flags, where.config)
    if where.json:
        as_json(rows)
        return
    table(
        rows,
        {
            "name": lambda r: r.name,
            "value": lambda r: r.value,
            "from": lambda r: r.source,
            "meaning": lambda r: r.help,
        },
        "",
    )


def status(*, where: TargetOptions = HERE) -> int:
    """Print runs, workers, merges and health. Exit code 1 where the verdict is bad."""
    from coordinator.admin import upkeep_commands as commands
    from coordinator.top.tables import lines

    overview = call(where, commands.top, commands.Top())
    if where.json:
        as_json(overview)
    else:
        for line in lines(overview):
            print(where.hint(line))
    return 1 if overview.verdict.level == "bad" else 0


def top(*, where: Where = HERE) -> int:
    """Watch runs, workers, merges and health live, until ctrl+c."""
    if not sys.stdout.isatty():
        raise BadRequest(
            "`coordinator top` needs a terminal: `coordinator status` prints the same once"
        )
    from coordinator.top.watch import watch

    with pause_watch():
        return watch(lambda: connected(where), where.hint)


def check(*, where: TargetOptions = HERE) -> int:
    """Check every invariant: ledger, queue, blobs byte by byte, versions.

    Exit code 1 on any breach.
    """
    from coordinator.admin import upkeep_commands as commands

    report = call(where, commands.check, EmptyRequest())
    if where.json:
        as_json(report)
    else:
        looked = ", ".join(f"{count:,} {name}" for name, count in report.looked_at.items())
        print(f"{breach_state(report.breaches)}: {looked}, the ledger and the record checked")
    return 1 if report.breaches else 0


backups = App(name="backup", help="Save database, blobs and keys; look after what was saved.")

Series = Annotated[
    str, Parameter(help="The folder of a backup, or of several, or s3://bucket/prefix.")
]


@backups.default
def backup(
    folder: Annotated[
        str,
        Parameter(
            help="A new or empty folder (with --keep or --every: the folder that holds one "
            "folder per backup), or s3://bucket/prefix, which holds any number."
        ),
    ],
    *,
    interval: Annotated[
        str, Parameter(name="--every", help="Repeat at this interval until stopped: 1d, 6h.")
    ] = "",
    keep: Annotated[
        int, Parameter(help="Keep this many of the newest backups, delete the others.")
    ] = 0,
    where: TargetOptions = HERE,
) -> None:
    """Back up database, blobs and keys while the server works, and verify the copy.

    The folder holds secrets: keep it private. Backups of one folder share the blobs that did not
    change.
    """
    import os
    from contextlib import suppress

    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    if keep < 0:
        raise BadRequest("--keep must be at least 1")
    wait_s = _seconds(interval) if interval else 0.0
    while True:
        began = time.time()
        try:
            _once(folder, where, keep, alone=not (interval or keep))
        except Unavailable as error:
            if not interval or error.exit_code == Configuration.exit_code:
                raise
            print(f"coordinator: {error.message}; next try after {interval}", file=sys.stderr)
        if not interval:
            return
        with pause_watch():
            time.sleep(max(1.0, began + wait_s - time.time()))


def _once(folder: str, where: TargetOptions, keep: int, *, alone: bool) -> None:
    from coordinator.admin import upkeep_commands as commands

    now = time.time()
    if folder.startswith(SCHEME):
        _saved(_into_store(where, folder, now), json=where.json)
    elif alone:
        request = commands.Backup(to=str(_absolute(folder)))
        _saved(call(where, commands.backup, request), json=where.json)
    else:
        _saved(_into_series(where, _absolute(folder), now), json=where.json)
    for backup_name in _pruned(folder, keep) if keep else ():
        print(f"Deleted {backup_name}.", file=sys.stderr if where.json else sys.stdout)


def _absolute(folder: str) -> Path:
    from coordinator.storage.folders import is_address

    if is_address(folder):
        raise BadRequest(f'backups are in a folder or in s3://bucket/prefix, not "{folder}"')
    return Path(folder).expanduser().absolute()


def _into_series(where: Where, place: Path, now: float) -> BackupSummary:
    from coordinator.admin import upkeep_commands as commands
    from coordinator.upkeep import backup_series as series

    to, before = series.next_folder(place, now), series.folders(place)
    request = commands.Backup(to=str(to), like=str(before[-1]) if before else "")
    return call(where, commands.backup, request)


def _into_store(where: Where, url: str, now: float) -> BackupSummary:
    import tempfile

    import msgspec

    from coordinator.admin import upkeep_commands as commands
    from coordinator.upkeep import backup_series as series

    names = _of_store(url, lambda backups, _: backups.names())
    with tempfile.TemporaryDirectory(prefix="coordinator-backup-") as scratch:
        for name in names:
            (Path(scratch) / name).mkdir()
        to = series.next_folder(Path(scratch), now)
        summary = call(where, commands.backup, commands.Backup(to=str(to), store=url))
        return msgspec.structs.replace(summary, path=f"{url.rstrip('/')}/{to.name}")


def _pruned(folder: str, keep: int) -> list[str]:
    if folder.startswith(SCHEME):
        return _of_store(folder, lambda backups, _: backups.prune(keep))
    from coordinator.upkeep import backup_series as series

    return [str(path) for path in series.prune(_absolute(folder), keep)]


def _of_store(url: str, work: Callable[[StoredBackups, Path], Coroutine[Any, Any, T]]) -> T:
    """Run an action on the backups of a store."""
    import asyncio
    import tempfile

    from coordinator.upkeep.stored_backups import StoredBackups

    with tempfile.TemporaryDirectory(prefix="coordinator-backup-") as scratch:
        return asyncio.run(work(StoredBackups(url, Path(scratch)), Path(scratch)))


def _seconds(text: str) -> float:
    """Return the seconds of a time such as 6h. Raises BadRequest."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86_400}.get(text[-1:])
    if unit is None or not re.fullmatch("0{0,8}[1-9][0-9]{0,4}", text[:-1]):
        raise BadRequest(f'--every must look like 1d, 6h or 30m, not "{text}"')
    return float(int(text[:-1]) * unit)


def _saved(summary: BackupSummary, *, json: bool) -> None:
    if json:
        as_json(summary)
    else:
        print(
            f"Saved to {summary.path}: {summary.rows:,} rows, {summary.blobs:,} blobs, "
            f"{size(summary.bytes)}.",
            flush=True,
        )


@backups.command(name="list")
def list_backups(folder: Series, *, json: Json = False) -> None:
    """Backups of a folder, oldest first."""
    from coordinator.upkeep import backup_series as series

    if folder.startswith(SCHEME):
        rows = _of_store(folder, lambda backups, scratch: backups.listing(scratch))
    else:
        rows = series.listing(_absolute(folder))
    if json:
        as_json(rows)
        return
    table(
        rows,
        {
            "made": lambda b: when(b.created_at),
            "rows": lambda b: f"{b.rows:,}",
            "blobs": lambda b: f"{b.blobs:,}",
            "size": lambda b: size(b.bytes),
            "folder": lambda b: b.path,
        },
        "No backup yet.",
    )


@backups.command(name="verify")
def verify_backup(folder: Series, *, json: Json = False) -> None:
    """Read every byte of a backup, or of the newest of several. Exit code 78 if it is damaged."""
    from coordinator.upkeep import backup_series as series
    from coordinator.upkeep.stored_backups import at_hand

    with at_hand(folder) as source:
        backup_facts = series.verify(source)
    if json:
        as_json(backup_facts)
    else:
        place = folder if folder.startswith(SCHEME) else backup_facts.path
        print(f"{place} is whole: {backup_facts.rows:,} rows, {backup_facts.blobs:,} blobs.")


@backups.command(name="prune")
def prune_backups(
    folder: Series,
    *,
    keep: Annotated[int, Parameter(help="Number of backups to keep.")] = 7,
    json: Json = False,
) -> None:
    """Delete all but the newest backups of a folder."""
    if keep < 1:
        raise BadRequest("--keep must be at least 1")
    deleted = _pruned(folder, keep)
    if json:
        as_json({"deleted": deleted})
        return
    for name in deleted:
        print(f"Deleted {name}.")
    if not deleted:
        print(f"Nothing to delete: there are {keep} backups at most.")


async def _drill(settings: Settings, folder: Path) -> DrillReport:
    """Restore a backup into a scratch directory, check it there, and delete it."""
    import tempfile

    import msgspec

    from coordinator.database import runs
    from coordinator.services import opened
    from coordinator.upkeep.backup import restore as bring_back
    from coordinator.upkeep.backup_series import DrillReport

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="coordinator-drill-") as scratch:
        place = msgspec.structs.replace(settings, data_dir=scratch, database="", blobs="")
        done = await bring_back(place, folder)
        async with opened(place) as coordinator:
            report = await coordinator.checks.run()
            rows = await coordinator.db.read(runs.every)
    return DrillReport(
        backup=msgspec.structs.replace(done, path=str(folder)),
        heads={run.name: run.head for run in rows},
        seconds=time.monotonic() - began,
        breaches=report.breaches,
    )


@backups.command(name="drill")
def drill_backup(folder: Series, *, where: TargetOptions = HERE) -> int:
    """Restore a backup, or the newest of several, into a scratch directory and check it there.

    Exit code 1 on any breach. Nothing of the server is touched.
    """
    import asyncio

    from coordinator.upkeep.stored_backups import at_hand

    if where.remote:
        raise BadRequest("backup drill works on this machine: leave --server out")
    with at_hand(folder) as source:
        done = asyncio.run(_drill(where.settings(), source))
        place = folder if folder.startswith(SCHEME) else done.backup.path
    if where.json:
        as_json(done)
    else:
        state = breach_state(done.breaches) if done.breaches else "no breaches"
        heads = ", ".join(
            f"{run} at version {head}" if head >= 0 else f"{run} not started"
            for run, head in done.heads.items()
        )
        print(
            f"Restored {place} of {when(done.backup.created_at)} in "
            f"{done.seconds:.0f} s: {done.backup.rows:,} rows, {done.backup.blobs:,} blobs; "
            f"{heads or 'no run'}; {state}."
        )
    return 1 if done.breaches else 0


def restore(
    folder: Series,
    *,
    where: TargetOptions = HERE,
) -> None:
    """Check a backup, or the newest of several, and fill a new data directory (or empty database)
    with it.
    """
    import asyncio

    from coordinator.upkeep.backup import restore as bring_back
    from coordinator.upkeep.stored_backups import at_hand

    if where.remote:
        raise BadRequest("restore works on the server's own machine: leave --server out")
    with at_hand(folder) as source:
        done = asyncio.run(bring_back(where.settings(), source))
    if where.json:
        as_json(done)
    else:
        print(
            f"Restored to {done.path} what was saved on {when(done.created_at)}: {done.rows:,} "
            f"rows, {done.blobs:,} blobs. Key {done.fingerprint}.\n"
            "Volunteers that saw later versions show a statement of this restore, signed with the "
            "key, keep the receipts of what was lost, and go on by themselves."
        )
        for name in done.private_runs:
            print(
                f'"{name}" does not count versions that were published after the backup: their '
                "epsilon is spent, beyond what [privacy] shows from now on."
            )


def add_to(parent: App) -> None:
    for command in (status, top, settings, check, restore):
        parent.command(command)
    parent.command(alerts)
    parent.command(backups)
