"""The commands `coordinator serve` and `coordinator demo`."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Group, Parameter

from coordinator.cli.listing import as_json
from coordinator.cli.target import HERE, TARGET, StoragePlace, TargetOptions
from shared.errors import BadRequest
from shared.files.deletions import delete_file
from shared.programs.silence_watch import end_watch

if TYPE_CHECKING:
    from coordinator.config import Settings

Demo = Literal["gpt", "dcgan", "gomoku", "rollouts", "causal-lm", "members"]
SERVER = Group("Server", sort_key=60)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeOptions(StoragePlace):
    """Settings that are also flags of `serve`; docs/settings.md lists all."""

    host: Annotated[
        str | None,
        Parameter(group=SERVER, help="Address to listen on; 0.0.0.0 lets others in, with TLS."),
    ] = None
    port: Annotated[int | None, Parameter(group=SERVER, help="TCP port; 0 takes a free one.")] = (
        None
    )
    url: Annotated[
        str | None, Parameter(group=SERVER, help="Public address, when behind a proxy.")
    ] = None
    name: Annotated[str | None, Parameter(group=SERVER, help="Name shown to volunteers.")] = None
    contact: Annotated[str | None, Parameter(group=SERVER, help="Contact shown to volunteers.")] = (
        None
    )
    invite_only: Annotated[
        bool | None, Parameter(group=SERVER, help="Refuse registrations without an invite.")
    ] = None
    open: Annotated[
        bool | None,
        Parameter(group=SERVER, help="Strangers register without a code, on probation."),
    ] = None
    tls_cert: Annotated[
        str | None, Parameter(group=SERVER, help="Certificate file of your own.")
    ] = None
    tls_key: Annotated[str | None, Parameter(group=SERVER, help="Key file of tls-cert.")] = None
    inference: Annotated[
        str | None,
        Parameter(group=SERVER, help="What answers prompts: builtin, off or an address."),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        Parameter(group=SERVER, help="Lowest log level shown."),
    ] = None
    json_logs: Annotated[bool | None, Parameter(group=SERVER, help="Log lines as JSON.")] = None


_DEFAULTS = ServeOptions()


def serve(
    *,
    options: ServeOptions = _DEFAULTS,
    config: Annotated[Path | None, Parameter(group=TARGET, help="Settings file.")] = None,
    qr: Annotated[
        bool, Parameter(group=SERVER, help="Show the join link as a QR code too.", negative="")
    ] = False,
) -> int:
    """Serve volunteers until a stop signal. No option is needed.

    Prints the join link. Beyond this machine (--host 0.0.0.0) it makes its own TLS certificate,
    which the link pins, and the link carries an invite code: without it nobody registers, unless
    --open is given.
    """
    from shared.programs import gc_freeze

    with gc_freeze.long_lived():
        from coordinator.config import TABLE, load
        from coordinator.http.server import serve as run

    for variable in TABLE.ignored(os.environ):
        print(f"{variable} is ignored: no setting has this name", file=sys.stderr)
    return run(load(asdict(options), config=config), say=_say_with_code if qr else _say)


def _say(line: str) -> None:
    end_watch()
    print(line, flush=True)


def _say_with_code(line: str) -> None:
    from coordinator.http.server import JOIN
    from shared.network.qr import qr_coloured

    _say(line)
    if line.startswith(JOIN):
        _say(qr_coloured(line.removeprefix(JOIN).strip("'"), "  "))


def demo(
    *,
    workload: Annotated[Demo, Parameter(help="What to train.")] = "gpt",
    volunteers: Annotated[int, Parameter(help="Volunteer processes.")] = 2,
    minutes: Annotated[
        float, Parameter(help="How long to train; 0 = as long as suits the workload.")
    ] = 0.0,
    data_dir: Annotated[str, Parameter(help="Data directory (default: a temporary one).")] = "",
    json: Annotated[bool, Parameter(help="The summary as JSON.", negative="")] = False,
) -> int:
    """Train a small model with volunteers on this machine, for real, then print the result.

    gpt, dcgan, gomoku and rollouts need nothing more, causal-lm the extra hf. Training takes two
    minutes (gomoku and rollouts three), the preparation up to five more on a busy machine.
    """
    from coordinator.demo.demo import DemoOptions
    from coordinator.demo.demo import demo as run

    return run(
        DemoOptions(
            workload=workload, volunteers=volunteers, minutes=minutes, data_dir=data_dir, json=json
        )
    )


def migrate(
    *,
    new_tokens: Annotated[
        bool,
        Parameter(
            help="Replace admin.token and metrics.token; running servers keep the old ones "
            "until they start again.",
            negative="",
        ),
    ] = False,
    recovered: Annotated[
        bool,
        Parameter(
            help="Tell volunteers, signed, that the database was restored to an earlier moment.",
            negative="",
        ),
    ] = False,
    take_over: Annotated[
        bool,
        Parameter(
            help="Make the blob store this database's: no other server may use it any more.",
            negative="",
        ),
    ] = False,
    where: TargetOptions = HERE,
) -> None:
    """Upgrade the database to this version, or create it. Back up first."""
    import asyncio

    from coordinator.config import without_password
    from coordinator.storage.folders import data_directory

    if where.remote:
        raise BadRequest("migrate works on the server's own machine: leave --server out")
    settings = where.settings()
    data_directory(settings.directory)
    was_empty = asyncio.run(_upgrade(settings, take_over=take_over))
    if new_tokens:
        asyncio.run(_renew_tokens(settings))
    stated = asyncio.run(_state(settings)) if recovered else ""
    if take_over:
        asyncio.run(_take_over(settings))
    database = without_password(settings.database_url)
    if where.json:
        as_json(
            {
                "database": database,
                "new_tokens": new_tokens,
                "recovered": recovered,
                "stated": stated,
                "take_over": take_over,
            }
        )
    else:
        print(f"{database} {'was empty and is a new one now' if was_empty else 'is up to date'}")
        if stated:
            print(stated)
        if take_over:
            print(f"the blob store {without_password(settings.blobs_url)} is its own from now on")


async def _upgrade(settings: Settings, *, take_over: bool) -> bool:
    """Upgrade the database, or create it; return True if it was empty. Raises Configuration for an
    empty database whose blob store is in use, unless `take_over`.
    """
    from coordinator.database.engine.open_database import is_new
    from coordinator.database.engine.open_database import migrate as bring
    from coordinator.services import check_unused

    if not take_over and await is_new(settings.database_url):
        await check_unused(settings)
    return await bring(settings.database_url)


async def _state(settings: Settings) -> str:
    """Sign the present state as recovered; return a sentence about the signed state."""
    from coordinator.upkeep.backup import state_recovery

    stated = await state_recovery(settings)
    heads = ", ".join(f"{run} {version}" for run, version in sorted(stated.heads.items()))
    return (
        f"signed for the volunteers: {heads or 'no runs'}, {stated.tree.size:,} rows of the "
        "record; running servers tell them within a minute"
    )


async def _take_over(settings: Settings) -> None:
    """Mark the blob store as this database's."""
    from coordinator.services import opened

    async with opened(settings) as coordinator:
        await coordinator.store_marks.take_over()


async def _renew_tokens(settings: Settings) -> None:
    """Make new tokens and write them into the data directory."""
    from coordinator.accounts.server_identity import renew_tokens
    from coordinator.database.engine.open_database import Database
    from coordinator.services import opened

    db = await Database.open(settings.database_url)
    try:
        await db.write(renew_tokens)
    finally:
        await db.close()
    delete_file(settings.admin_token_file, "asked")
    delete_file(settings.metrics_token_file, "asked")
    async with opened(settings):
        pass  # writes the files


def add_to(app: App) -> None:
    app.command(serve)
    app.command(demo)
    app.command(migrate)
