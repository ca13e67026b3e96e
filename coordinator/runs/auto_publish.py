"""Publishing on a model hub without being asked each time: every so many versions, or the best.

A try is leased in the database, so that of several coordinators one makes it, and another goes on
when that one is gone. What failed is tried again, later each time. Export and upload run in a
process of their own: neither holds up a server, an evaluation or the end of either.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from coordinator.compute import Compute, Stop
from coordinator.database import audit, runs
from coordinator.database.hub import publications
from coordinator.database.hub.publications import Mode, PublicationRow
from coordinator.runs.export import PLAIN, Files, Source, check_format, write
from coordinator.runs.model_hub import PREFIX, Hub, repository
from shared.clock import Clock
from shared.errors import BadRequest, VolunteerError, why
from shared.text import printable

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.engine.open import Database
    from coordinator.runs.export import Export
    from coordinator.storage.blobs import BlobStore

POLL_S = 5.0
PAUSE_S = 60.0  # from one version to the next: hubs count commits
LEASE_S = 300.0
RENEW_S = 60.0
RETRY_S, RETRY_MAX_S = 30.0, 3600.0  # the wait doubles with each failure
EVERY_MAX = 1_000_000
ERROR_CHARS = 500

log = structlog.get_logger("publishing")


def push(stop: Stop, found: tuple[Source, Files], folder: Path, target: tuple[str, Path]) -> str:
    """Export a version into `folder`, for the time being, and send it to `target`, a repository and
    the file of a token; return its address.
    """
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    try:
        hub = Hub.of(*target)
        made = write(stop, *found, folder)
        return hub.publish(folder, f'Version {made.version} of "{made.run}"')
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Sender:
    """All that it takes to send a version to a hub; the token may lie in a file."""

    blobs: BlobStore
    export: Export
    compute: Compute
    token_file: Path

    async def send(self, name: str, version: int, row: PublicationRow) -> str:
        """Return the address. Raises what exporting and the hub raise."""
        found = await self.export.find(name, version, row.format)
        folder = self.blobs.scratch() / f"publish-{row.run_id}"
        target = (PREFIX + row.repository, self.token_file)
        return await self.compute.run(push, found, folder, target)


class AutoPublish:
    """Publishes versions in the background."""

    def __init__(self, db: Database, clock: Clock, sender: Sender) -> None:
        self._db = db
        self._clock = clock
        self._sender = sender

    async def order(self, name: str, auto: str, to: str = "", format: str = "") -> PublicationRow:
        """Store what is to be published of a run; "" = as before. Begins anew, without failures.

        Raises BadRequest, NotFound.
        """
        mode, every = _mode(auto)

        def change(conn: Connection) -> PublicationRow:
            run = runs.by_name(conn, name)
            before = publications.to_change(conn, run.id)
            if before is None and not to:
                raise BadRequest(f"name the repository: --to {PREFIX}OWNER/NAME")
            row = PublicationRow(
                run_id=run.id,
                mode=mode,
                every=every,
                repository=repository(to) if to else before.repository if before else "",
                format=format or (before.format if before else PLAIN),
                version=None,
                published_at=None,
                url="",
                failures=0,
                error="",
                next_at=0.0,
            )
            check_format(run.workload, row.format)
            if before and (before.repository, before.format) == (row.repository, row.format):
                row = msgspec.structs.replace(
                    row, version=before.version, published_at=before.published_at, url=before.url
                )
            publications.store(conn, row)
            detail = f"{auto} to {row.repository} as {row.format}"
            audit.append(conn, "organiser", "run.publish", name, detail, self._clock.now())
            return row

        return await self._db.write(change)

    async def of(self, name: str) -> PublicationRow | None:
        """Return what is published of a run, if that was ever asked for. Raises NotFound."""
        return await self._db.read(lambda conn: publications.of(conn, runs.by_name(conn, name).id))

    async def run(self, stop: asyncio.Event) -> None:
        """Publish whatever is due until `stop` is set."""
        stopper = asyncio.ensure_future(stop.wait())
        stopper.add_done_callback(lambda _: self._sender.compute.close())
        try:
            while not stop.is_set():
                if not await self.publish_next():
                    await asyncio.wait(
                        (stopper, rest := asyncio.ensure_future(self._clock.sleep(POLL_S))),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    rest.cancel()
        finally:
            stopper.cancel()

    async def publish_next(self) -> bool:
        """Try one publication that is due. False when none is."""
        if (found := await self._db.read(self._due)) is None:
            return False
        row, name, version = found
        leased = self._clock.now() + LEASE_S
        if not await self._db.write(lambda conn: publications.take(conn, row, leased)):
            return True  # another coordinator does it, or the organiser changed it
        try:
            url = await self._keeping(row, self._sender.send(name, version, row))
        except Exception as error:  # whatever it is, it is said and tried again
            await self._failed(row, name, version, error)
            return True
        now = self._clock.now()
        done = {"version": version, "published_at": now, "url": url}
        await self._report(row, failures=0, error="", next_at=now + PAUSE_S, **done)
        log.info("published", run=name, version=version, url=url)
        return True

    def _due(self, conn: Connection) -> tuple[PublicationRow, str, int] | None:
        for row in publications.waiting(conn, self._clock.now()):
            run = runs.by_id(conn, row.run_id)
            version = publications.due(conn, row, run)
            if version is not None:
                return row, run.name, version
        return None

    async def _keeping(self, row: PublicationRow, work: Coroutine[Any, Any, str]) -> str:
        """Wait for a try, and renew its lease meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait((task,), timeout=RENEW_S))[0]:
                await self._report(row, next_at=self._clock.now() + LEASE_S)
            return task.result()
        finally:
            task.cancel()

    async def _failed(self, row: PublicationRow, name: str, version: int, error: Exception) -> None:
        if self._sender.compute.stopping:  # no fault of anybody: the next server begins with it
            await self._report(row, next_at=row.next_at)
            return
        wait = min(RETRY_S * 2.0 ** min(row.failures, 20), RETRY_MAX_S)
        told = error.message if isinstance(error, VolunteerError) else why(error)
        said = printable(told, ERROR_CHARS)
        log.warning("publishing failed", run=name, version=version, error=said, again_in_s=wait)
        next_at = self._clock.now() + wait
        await self._report(row, failures=row.failures + 1, error=said, next_at=next_at)

    async def _report(self, row: PublicationRow, **values: Any) -> None:
        await self._db.write(lambda conn: publications.report(conn, row, **values))


def _mode(auto: str) -> tuple[Mode, int]:
    """Read `every=N`, `best` or `off`. Raises BadRequest."""
    if auto == "best" or auto == "off":
        return ("best" if auto == "best" else "off"), 0
    number = auto.removeprefix("every=")
    if number == auto or not (number.isascii() and number.isdecimal()) or len(number) > 7:
        raise BadRequest(f'--auto takes every=N (versions), best or off, not "{auto[:40]}"')
    if not 1 <= int(number) <= EVERY_MAX:
        raise BadRequest(f"--auto every=N takes a number from 1 to {EVERY_MAX:,}")
    return "every", int(number)
