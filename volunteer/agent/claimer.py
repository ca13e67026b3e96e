"""Claims of tasks for one device: each returns a lease, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.errors import StorageFull, VolunteerError
from shared.protocol import leases as wire
from shared.protocol.leases import ClaimRequest, Lease
from shared.sentences import Sentence
from shared.tensors.codec import CODECS
from shared.text import printable
from shared.workloads.base import Workload, libraries_here
from volunteer.agent.held_leases import LeaseInWork
from volunteer.agent.lease_ends import LeaseEnds
from volunteer.agent.lifecycle import FATAL
from volunteer.agent.run_choice import WantedWork
from volunteer.agent.workplace import LentDevice, Workplace
from volunteer.i18n.coordinator import idle_sentence
from volunteer.storage.leases import HeldLease

WAIT_S = 30.0  # longest wait of one claim at the coordinator
REFUSED_WAIT_S = 60.0
OLDER_WAIT_S = 30.0  # wait after the coordinator offered an older version than before
DISK_WAIT_S = 60.0
SHORT_WAIT_S = 60.0  # short, since the list of runs may have changed


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleReason:
    """Reason why a device has no lease, as a code and a sentence; without a code it is not
    announced.

    `wait_s` is the time until the next claim: 0 means at once, None after the next change.
    """

    reason: str = ""
    message: str = ""
    wait_s: float | None = None


ENOUGH = Sentence("enough tasks were taken")
AT_ONCE = IdleReason(wait_s=0.0)
UNWANTED = IdleReason()  # the claim was cancelled


@dataclass(eq=False, kw_only=True)
class Claimer:
    """Claims tasks for one device."""

    device: LentDevice
    place: Workplace
    ends: LeaseEnds
    workloads: Callable[[], Mapping[str, Workload]] = dict  # workloads available here

    def hindrance(self, choice: WantedWork | None) -> IdleReason | None:
        """Return the reason that forbids a claim of this work; None if nothing forbids it."""
        if self.place.store.outbox.full:
            return IdleReason(
                reason="outbox_full",
                message=Sentence("many results wait to be submitted: no new work"),
            )
        if choice is None:
            return IdleReason(
                reason="consent", message=Sentence("say yes to the licence of a run first")
            )
        if choice.short:
            return IdleReason(reason="memory", message=choice.short, wait_s=SHORT_WAIT_S)
        return None

    @property
    def late_result_reason(self) -> IdleReason | None:
        """Return the reason to delay the next task: a late result waits to be submitted; else
        None.
        """
        if any(self.place.store.outbox.holds(*key) for key in self.place.held.late):
            return IdleReason(
                reason="late", message=Sentence("submitting a late result before more is claimed")
            )
        return None

    @property
    def done(self) -> bool:
        """Return True if all requested tasks are submitted."""
        return self.place.held.exhausted and not len(self.place.store.outbox)

    async def claim(
        self, choice: WantedWork, *, share: float, long_poll: bool
    ) -> Lease | IdleReason:
        """Claim once; with `long_poll` the coordinator may hold the request until it has work. Pass
        a returned lease to `accept`.

        `share` is the device's share of working time. Raises errors that end the agent.
        """
        try:
            reply = await self._request(choice, share, WAIT_S if long_poll else 0.0)
        except FATAL:
            raise
        except VolunteerError as error:
            return IdleReason(reason="refused", message=error.message, wait_s=REFUSED_WAIT_S)
        if isinstance(reply, Lease):
            return reply
        if reply is None:
            return AT_ONCE
        jitter = self.place.timing.rng.uniform(1.0, 1.2)
        wait = max(0.2, reply.retry_after_s) * jitter if long_poll else 0.0
        message = idle_sentence(reply.reason, printable(reply.message))
        return IdleReason(reason=reply.reason.value, message=message, wait_s=wait)

    async def _request(
        self, choice: WantedWork, share: float, wait_s: float
    ) -> Lease | wire.IdleReply | None:
        workloads = self.workloads()
        libraries = {
            library for workload in workloads.values() for library in libraries_here(workload)
        }
        request = ClaimRequest(
            claim_id=self.place.store.leases.claim_id(self.device.id),
            device=self.device.id,
            step_flops=self.device.speed() * share,
            memory_bytes=self.device.memory_bytes,
            host_bytes=self.device.host_bytes,
            runs=choice.runs,
            kinds=choice.kinds,
            codecs=tuple(CODECS),
            workload_versions={name: workload.version for name, workload in workloads.items()},
            libraries=tuple(sorted(libraries)),
            wait_s=wait_s,
            audits=True,
        )
        reply = await self.place.remote.api.claim(request)
        return reply.lease or reply.idle

    async def accept(self, lease: Lease, choice: WantedWork) -> LeaseInWork | IdleReason:
        """Store the lease and return it as a lease in work; return the reason why the device has no
        lease if it is not of the chosen work, its result is stored already, the disk is full, or
        `max_tasks` is reached.
        """
        device, leases, holding = self.device.id, self.place.store.leases, self.place.held
        stored_lease = HeldLease(lease=lease, device=device, claim_id=leases.claim_id(device))
        if holding.get(stored_lease.key) is not None or self.place.store.outbox.holds(
            *stored_lease.key
        ):
            leases.forget_claim(device)
            return AT_ONCE
        work = LeaseInWork(stored_lease)
        if not choice.takes(lease):
            leases.forget_claim(device)
            message = Sentence(
                "the coordinator gave a task of {run} ({kind}), which was not asked for",
                run=printable(lease.run, 64),
                kind=printable(lease.job.kind, 64),
            )
            await self.ends.give_back(work, message, failed=False)
            return IdleReason(reason="refused", message=message, wait_s=REFUSED_WAIT_S)
        try:
            leases.keep_claimed(stored_lease)
        except StorageFull as error:
            leases.forget_claim(device)
            await self.ends.give_back(work, error.message, failed=False)
            return IdleReason(reason="disk_full", message=error.message, wait_s=DISK_WAIT_S)
        if holding.exhausted:  # another device took the last task
            await self.ends.give_back(work, ENOUGH, failed=False)
            return UNWANTED
        holding.take(work)
        return work
