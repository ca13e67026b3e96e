"""top, check, backup, restore, alerts: is everything right, who is told, can it be had back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from coordinator.cli.listing import as_json, table, when
from coordinator.cli.runs import Json
from coordinator.cli.target import HERE, Where, call, connected
from shared.text import size

alerts = App(
    name="alerts", help="Alerts to the organiser: those that stand, a test of the webhook."
)


@alerts.command(name="list")
def list_alerts(*, where: Where = HERE, json: Json = False) -> None:
    """Alerts that were said and are not over."""
    found = call(where, "alerts.list")
    if json:
        as_json(found)
        return
    columns = {
        "kind": lambda a: a.kind,
        "about": lambda a: a.about,
        "since": lambda a: when(a.since),
        "message": lambda a: a.message,
    }
    table(found, columns, "All is well.")


@alerts.command(name="test")
def try_alerts(*, where: Where = HERE, json: Json = False) -> int:
    """Send a test to the webhook. Exit code 1 where it did not arrive."""
    found = call(where, "alerts.test")
    if json:
        as_json(found)
    else:
        print(found.problem or "sent")
    return 1 if found.problem else 0


def top(
    *,
    once: Annotated[bool, Parameter(help="Print one picture as text.", negative="")] = False,
    where: Where = HERE,
    json: Json = False,
) -> int:
    """Watch runs, workers, merges and health live; `?` shows the keys.

    One picture (--once, --json) exits with 1 where the verdict is bad.
    """
    if not (once or json):
        return _watch(where)
    from coordinator.top.tables import lines

    seen = call(where, "top")
    if json:
        as_json(seen)
    else:
        for line in lines(seen):
            print(line)
    return 1 if seen.verdict.level == "bad" else 0


def _watch(where: Where) -> int:
    import sys

    from shared.errors import BadRequest

    if not (sys.stdin.isatty() and sys.stderr.isatty()):  # where textual draws
        raise BadRequest("this is no terminal: `coordinator top --once` prints one picture")
    from coordinator.top.app import watch

    return watch(lambda: connected(where))


def check(*, where: Where = HERE, json: Json = False) -> int:
    """Check every invariant: ledger, queue, blobs byte by byte, versions.

    Exit code 1 on any breach.
    """
    report = call(where, "check")
    if json:
        as_json(report)
    else:
        looked = ", ".join(f"{count:,} {name}" for name, count in report.looked_at.items())
        for breach in report.breaches:
            print(f"BREACH  {breach}")
        state = f"{len(report.breaches)} breaches" if report.breaches else "all is well"
        print(f"{state}: {looked}, the ledger and the record checked")
    return 1 if report.breaches else 0


def backup(
    folder: Annotated[Path, Parameter(help="A new or empty folder.")],
    *,
    where: Where = HERE,
    json: Json = False,
) -> None:
    """Save database, blobs and keys, while the server works.

    The folder holds secrets: keep it private.
    """
    done = call(where, "backup", to=str(folder.expanduser().absolute()))
    if json:
        as_json(done)
    else:
        print(
            f"Saved to {done.path}: {done.rows:,} rows, {done.blobs:,} blobs, {size(done.bytes)}."
        )


def restore(
    folder: Annotated[Path, Parameter(help="A folder that backup has written.")],
    *,
    where: Where = HERE,
    json: Json = False,
) -> None:
    """Check a backup and fill a new data directory (or an empty database) with it."""
    import asyncio

    from coordinator.upkeep.backup import restore as bring_back
    from shared.errors import BadRequest

    if where.remote:
        raise BadRequest("restore works on the server's own machine: leave --server out")
    done = asyncio.run(bring_back(where.settings(), folder.expanduser().absolute()))
    if json:
        as_json(done)
    else:
        print(
            f"Restored to {done.path} what was saved on {when(done.created_at)}: {done.rows:,} "
            f"rows, {done.blobs:,} blobs. Key {done.fingerprint}.\n"
            "Volunteers that saw later versions show a statement of this restore, signed with the "
            "key, keep the receipts of what was lost, and go on by themselves."
        )


def add_to(parent: App) -> None:
    for command in (top, check, backup, restore):
        parent.command(command)
    parent.command(alerts)
