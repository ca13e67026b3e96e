"""What resident volunteers of several benchmarks do alike: an update is uploaded and submitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.protocol import endpoints
from shared.protocol.contributions import SubmitRequest, UploadRequest
from shared.protocol.leases import BeginReply, Lease
from shared.tensors.codec import EncodedUpdate
from volunteer.net.api import Api
from volunteer.net.transfers import Transfers


class Handing:
    """One update of a lease on its way to the coordinator."""

    def __init__(self, lease: Lease, begun: BeginReply, made: EncodedUpdate, codec: str) -> None:
        self._lease = lease
        self._begun = begun
        self._codec = codec
        self._where: dict[str, Any] = {
            "attempt": lease.attempt,
            "part": 0,
            "tries": 0,
            "sha256": made.sha256,
            "size": made.size,
        }

    async def upload(self, transfers: Transfers, path: Path) -> None:
        request = UploadRequest(task=self._lease.task, **self._where)
        await transfers.upload(request, path, lambda done: None)

    async def submit(self, api: Api) -> None:
        """Submit the update, which must be accepted, or merged by the time of the answer."""
        job = self._lease.job
        said = SubmitRequest(
            **self._where,
            base_version=self._begun.version,
            codec=self._codec,
            steps=job.steps,
            samples=job.stop - job.start,
            loss_first=5.0,
            loss_last=5.0,
        )
        verdict = await api.call(endpoints.SUBMIT, {"task": self._lease.task}, said, patience_s=0)
        assert verdict.state in ("accepted", "merged"), verdict
