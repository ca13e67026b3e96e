"""Base version of each task: the coordinator binds it when work begins; its weights are fetched
ahead.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import InvalidFrame
from shared.files.deletions import delete_file
from shared.protocol.leases import BeginReply, Lease
from shared.protocol.versions import VersionManifest
from shared.sentences import Sentence
from volunteer.agent.downloads import Downloads
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.workplace import Workplace
from volunteer.control import events

NEWEST = ("train", "selfplay", "learn")  # kinds that begin with the newest version


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseVersion:
    """Base version of a task, on this machine."""

    begun: BeginReply
    manifest: VersionManifest
    weights: Path


@dataclass(eq=False, kw_only=True)
class BaseVersions:
    """Binds the base versions of one device's leases, and fetches their weights."""

    place: Workplace
    downloads: Downloads

    async def prefetch(self, work: LeaseInWork) -> None:
        """Fetch the newest version into the cache for a task that has not begun, if there is room.

        The base is bound when the task begins; if a newer version is published by then, only the
        links to it remain to be fetched.
        """
        lease = work.lease
        if lease.in_step or not _begins_at_newest(lease):
            return
        manifest = await self.downloads.newest(lease)
        if await self.downloads.fits(manifest):
            await self.downloads.weights(work, manifest)

    async def bind(
        self, work: LeaseInWork, stack: ExitStack, newest_manifest: VersionManifest | None = None
    ) -> BaseVersion | None:
        """Bind the base of a lease and fetch its weights, which are kept until `stack` closes.

        The coordinator chooses the newest version; for a task that began before a restart, it
        chooses the earlier base, and for an audit the base of the audited task. Return None if the
        coordinator chooses the version of `newest_manifest`, which is loaded already. Raises Gone,
        BadSignature, OlderVersion, InvalidFrame.
        """
        lease, before = work.lease, work.stored.begun
        if lease.in_step and before is None:
            await self._wait_for_submission(lease.run)
        floor = self.place.store.receipts.newest(lease.run)
        newest_here = None if newest_manifest is None else newest_manifest.version
        start = await self.place.remote.api.begin(lease.task, lease.attempt, newest_here)
        if start.version == newest_here:
            return None
        if start.manifest is None:
            raise InvalidFrame(
                Sentence("the coordinator sent no manifest of the version to begin from")
            )
        # A task that began before a restart keeps its base.
        newest = _begins_at_newest(lease) and before is None
        manifest = self.downloads.verify(start.manifest, lease, floor if newest else -1)
        if before is None or before.version != start.version:
            # the snapshot belongs to another base
            delete_file(self.place.store.leases.snapshot(lease), "replaced")
        bound = manifest.bound(lease.job)
        bound_lease = msgspec.structs.replace(lease, finish_by=start.finish_by, job=bound)
        work.change(begun=start, lease=bound_lease)
        self.place.store.leases.keep(work.stored)
        weights = await self.downloads.hold_weights(work, manifest, stack)
        return BaseVersion(begun=start, manifest=manifest, weights=weights)

    async def _wait_for_submission(self, run: str) -> None:
        """Wait until the last result of this run is submitted, so that the next base can contain
        it.
        """
        announced = False
        while self._has_unsent_result(run):
            change = self.place.life.change()
            if not announced:
                announced = True
                message = Sentence(
                    "submitting the last result; the next task begins with the next version"
                )
                self.place.bus.emit(events.Idle(reason="merging", message=message))
            await change

    def _has_unsent_result(self, run: str) -> bool:
        """Return True if a result of this run is being encoded or waits to be submitted."""
        encoding = any(work.phase == "encode" and work.lease.run == run for work in self.place.held)
        return encoding or any(entry.run == run for entry in self.place.store.outbox.entries())


def _begins_at_newest(lease: Lease) -> bool:
    """Return True if a lease begins with the newest version; an audit begins with the base of the
    audited task.
    """
    return lease.job.kind in NEWEST and lease.audit is None
