"""Leases that a service keeps while it works on jobs of the database."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import structlog

from coordinator.database.engine.leased_jobs import LeasedJob, LeasedJobs
from coordinator.platform import Platform, PlatformService
from shared.errors import VolunteerError

J = TypeVar("J", bound=LeasedJob)

log = structlog.get_logger("leases")


class LeaseKeeper(PlatformService):
    """Name of a service as an owner of jobs, different in each process, and the renewal of its
    leases.
    """

    def __init__(self, on: Platform) -> None:
        super().__init__(on)
        self.owner = secrets.token_hex(8)
        self.lease_s = on.settings.constants.job_lease_s  # time an owner may be silent

    @asynccontextmanager
    async def renewing(self, jobs: LeasedJobs[J], job: J) -> AsyncIterator[None]:
        """Renew a job's lease within the block. If another owner takes the job over, later
        changes of the job by this owner fail.
        """
        renewal = asyncio.ensure_future(self._renew(jobs, job))
        try:
            yield
        finally:
            renewal.cancel()

    async def _renew(self, jobs: LeasedJobs[J], job: J) -> None:
        while True:
            await self._clock.sleep(self.lease_s / 3)
            until = self._clock.now() + self.lease_s
            try:
                await self._db.write(partial(jobs.renew, job=job, until=until))
            except VolunteerError as error:
                log.warning("lease not renewed", job=repr(job)[:200], error=error.message)
