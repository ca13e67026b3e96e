"""Work that begins although the coordinator does not answer: from the newest version that is here.

Only where the run lets a base be older than its newest version: not where each task begins with the
merge of the last one, nor where a lease pulls versions while it is done. The coordinator is told of
the base as soon as it answers, at the latest before the result is handed in. From then on the lease
is like any other; a base that is too old by then is refused.
"""

from __future__ import annotations

import asyncio

import msgspec

from shared.errors import Gone, Unreachable
from shared.protocol.leases import BeginReply, Lease
from shared.protocol.versions import SignedManifest, VersionManifest
from volunteer.agent.context import Parts
from volunteer.agent.gradient_series import comes_in_parts
from volunteer.agent.shared_state import Held, with_begin
from volunteer.net.api import Api
from volunteer.net.retry import FOREVER

PATIENCE_S = 10.0  # a coordinator that restarts answers within this, with a newer base
NEWEST = ("train", "selfplay", "learn")  # kinds that begin with the newest version


async def tell(
    api: Api, task: int, attempt: int, base: int, patience_s: float = FOREVER
) -> BeginReply:
    """Say from which version work on a lease began. Raises Gone where it is too old by now."""
    reply = await api.begin(task, attempt, base=base, patience_s=patience_s)
    if reply.version != base:
        raise Gone(f"the coordinator wants task {task} from version {reply.version}, not {base}")
    return reply


class Early:
    """A lease that one device could begin with while offline."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._here: dict[str, tuple[VersionManifest, SignedManifest]] = {}  # by run

    def brought(self, manifest: VersionManifest, signed: SignedManifest) -> None:
        """The weights of this version are in the cache now."""
        known = self._here.get(manifest.run)
        if known is None or known[0].version <= manifest.version:
            self._here[manifest.run] = (manifest, signed)

    async def begin(self, held: Held) -> BeginReply:
        """The base that the coordinator names; one that is here already where it does not
        answer.
        """
        lease, before = held.stored.lease, held.stored.begun
        api = self._parts.api
        if before is not None and held.stored.early:  # by an earlier process
            reply = await tell(api, lease.task, lease.attempt, before.version)
            with_begin(held, early=False)
            return msgspec.structs.replace(reply, manifest=before.manifest)
        here = await self._base(lease) if before is None else None
        if here is None:
            return await api.begin(lease.task, lease.attempt)
        try:
            return await api.begin(lease.task, lease.attempt, patience_s=PATIENCE_S)
        except Unreachable as error:
            manifest, signed = here
            self._parts.hub.notice(
                f"the coordinator does not answer ({error.message}): task {lease.task} begins "
                "from version "
                f"{manifest.version}, which is here, and the coordinator is told later",
                "warning",
            )
        with_begin(held, early=True)
        return BeginReply(
            version=manifest.version,
            global_step=manifest.global_step,
            finish_by=lease.finish_by,
            manifest=signed,
        )

    async def tell(self, held: Held) -> None:
        """Tell of a base while the task trains; the task ends where it is refused."""
        stored = held.stored
        if not stored.early or stored.begun is None:
            return
        task, attempt = held.key
        try:
            reply = await tell(self._parts.api, task, attempt, stored.begun.version)
        except Gone as error:
            held.end("gone", error.message)
            return
        lease = msgspec.structs.replace(held.stored.lease, finish_by=reply.finish_by)
        with_begin(held, lease=lease, early=False)
        self._parts.leases.keep(held.stored)

    async def _base(self, lease: Lease) -> tuple[VersionManifest, SignedManifest] | None:
        if lease.in_step or lease.job.kind not in NEWEST or comes_in_parts(lease):
            return None
        found = self._here.get(lease.run)
        if found is None:
            return None
        weights = found[0].weights
        there = await asyncio.to_thread(self._parts.cache.find, weights.sha256, weights.size)
        return found if there is not None else None
