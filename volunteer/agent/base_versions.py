"""Base version of each task: the coordinator's newest one or, during an outage, the newest stored
one.

A stored version is used only if the run allows an older base: not if each task waits for the merge
of the previous one, nor if a lease pulls newer versions. The coordinator learns the base when it
answers again, at the latest before the result is submitted, and refuses one that is too old by
then.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shared.errors import Gone, InvalidFrame, Unreachable
from shared.protocol import endpoints
from shared.protocol.leases import BeginReply, BeginRequest, Lease
from shared.protocol.versions import SignedManifest, VersionManifest
from shared.sentences import Sentence
from volunteer.agent.collaborators import Workplace
from volunteer.agent.downloads import Downloads
from volunteer.agent.held_leases import LeaseInWork, LeaseKey
from volunteer.agent.stretch import LeasePlan
from volunteer.control import events
from volunteer.net.api import POLL_S, Api
from volunteer.net.retry import FOREVER

# A task begins from a stored version after this wait, in which a coordinator can restart.
PATIENCE_S = 10.0
NEWEST = ("train", "selfplay", "learn")  # kinds that begin with the newest version


async def announce_base(
    api: Api, key: LeaseKey, base: int, *, patience_s: float = FOREVER
) -> BeginReply:
    """Report the version that a lease began from. Raises Gone if it is too old by now."""
    task, attempt = key
    limits = {"timeout_s": POLL_S, "patience_s": patience_s}
    request = BeginRequest(attempt=attempt, base=base)
    reply = await api.call(endpoints.BEGIN, {"task": task}, request, **limits)
    if reply.version != base:
        raise Gone(
            Sentence(
                "the coordinator wants task {task} from version {version}, not {base}",
                task=task,
                version=reply.version,
                base=base,
            )
        )
    return reply


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
    # Newest stored version, by run.
    _here: dict[str, tuple[VersionManifest, SignedManifest]] = field(
        default_factory=dict, init=False
    )

    async def prefetch(self, held: LeaseInWork) -> None:
        """Fetch the newest version into the cache for a task that has not begun, if there is room.

        The base is bound when the task begins; if a newer version is published by then, only the
        links to it remain to be fetched.
        """
        lease = held.lease
        if lease.in_step or not _newest(lease):
            return
        manifest, signed = await self.downloads.newest(lease)
        if await self.downloads.fits(manifest):
            await self.downloads.weights(held, manifest)
            self._brought(manifest, signed)

    async def bind(
        self, held: LeaseInWork, stack: ExitStack, known: VersionManifest | None = None
    ) -> BaseVersion | None:
        """Bind the base of a lease and fetch its weights, which are kept until `stack` closes.

        The base is the newest version, or the one from before a restart. Returns None if `known`
        is already the newest. Raises Gone, BadSignature, InvalidFrame.
        """
        lease, before = held.lease, held.stored.begun
        if lease.in_step and before is None:
            await self._submitted(lease.run)
        floor = self.place.store.receipts.newest(lease.run)
        if known is None:
            begun = await self._begin(held)
        else:
            begun = await self.place.remote.api.begin(lease.task, lease.attempt, known.version)
            if begun.version == known.version:
                return None
        if begun.manifest is None:
            raise InvalidFrame(
                Sentence("the coordinator sent no manifest of the version to begin from")
            )
        # A task that began before, even during an outage, keeps its earlier base.
        newest = _newest(lease) and before is None and not held.stored.early
        manifest = self.downloads.checked(begun.manifest, lease, floor if newest else -1)
        if before is None or before.version != begun.version:
            # the snapshot belongs to another base
            self.place.store.leases.snapshot(lease).unlink(missing_ok=True)
        held.change(begun=begun, lease=_bound(lease, begun, manifest))
        self.place.store.leases.keep(held.stored)
        weights = await self.downloads.held_weights(held, manifest, stack)
        self._brought(manifest, begun.manifest)
        return BaseVersion(begun=begun, manifest=manifest, weights=weights)

    async def announce(self, held: LeaseInWork) -> None:
        """Report a base that the coordinator does not know yet; a refusal ends the task."""
        stored = held.stored
        if not stored.early or stored.begun is None:
            return
        try:
            reply = await announce_base(self.place.remote.api, held.key, stored.begun.version)
        except Gone as error:
            held.end("gone", error.message)
            return
        lease = msgspec.structs.replace(held.lease, finish_by=reply.finish_by)
        held.change(lease=lease, early=False)
        self.place.store.leases.keep(held.stored)

    def _brought(self, manifest: VersionManifest, signed: SignedManifest) -> None:
        """Record that the weights of this version are in the cache."""
        known = self._here.get(manifest.run)
        if known is None or known[0].version <= manifest.version:
            self._here[manifest.run] = (manifest, signed)

    async def _begin(self, held: LeaseInWork) -> BeginReply:
        """Return the base that the coordinator names; during an outage, a stored one."""
        lease, before = held.lease, held.stored.begun
        if before is not None and held.stored.early:  # begun by an earlier process
            reply = await announce_base(self.place.remote.api, held.key, before.version)
            held.change(early=False)
            return msgspec.structs.replace(reply, manifest=before.manifest)
        here = await self._base_here(lease) if before is None else None
        if here is None:
            return await self.place.remote.api.begin(lease.task, lease.attempt)
        try:
            return await self.place.remote.api.begin(
                lease.task, lease.attempt, patience_s=PATIENCE_S
            )
        except Unreachable as error:
            manifest, signed = here
            self.place.hub.notice(
                Sentence(
                    "the coordinator does not answer ({error}): task {task} begins from version "
                    "{version}, which is here, and the coordinator learns of it later",
                    error=error.message,
                    task=lease.task,
                    version=manifest.version,
                ),
                "warning",
            )
        held.change(early=True)
        return BeginReply(
            version=manifest.version,
            global_step=manifest.global_step,
            finish_by=lease.finish_by,
            manifest=signed,
        )

    async def _base_here(self, lease: Lease) -> tuple[VersionManifest, SignedManifest] | None:
        if lease.in_step or not _newest(lease) or LeasePlan.of(lease).several:
            return None
        found = self._here.get(lease.run)
        there = found is not None and await self.downloads.has_weights(found[0])
        return found if there else None

    async def _submitted(self, run: str) -> None:
        """Wait until the last result of this run is submitted, so that the next base can contain
        it.
        """
        announced = False
        while self._unsent(run):
            change = self.place.life.change()
            if not announced:
                announced = True
                message = Sentence(
                    "submitting the last result; the next task begins with the next version"
                )
                self.place.hub.emit(events.Idle(reason="merging", message=message))
            await change

    def _unsent(self, run: str) -> bool:
        """Return True if a result of this run is being encoded or waits to be submitted."""
        encoding = any(held.phase == "encode" and held.lease.run == run for held in self.place.held)
        return encoding or any(entry.run == run for entry in self.place.store.outbox.entries())


def _newest(lease: Lease) -> bool:
    """Return True if a lease begins with the newest version; an audit uses the audited one's."""
    return lease.job.kind in NEWEST and lease.audit is None


def _bound(lease: Lease, begun: BeginReply, manifest: VersionManifest) -> Lease:
    """Return the lease with the facts that the coordinator gave when work began."""
    job = msgspec.structs.replace(
        manifest.scheduled(lease.job),
        global_step=begun.global_step,
        base_version=begun.version,
        base_sha256=manifest.weights.sha256,
    )
    return msgspec.structs.replace(lease, finish_by=begun.finish_by, job=job)
