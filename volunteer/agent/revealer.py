"""Revealer: uploads the states from which a task can be recomputed, if the coordinator asks."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import VolunteerError
from shared.protocol.contributions import UploadInfo, UploadRequest
from shared.sentences import Sentence
from volunteer.agent.lifecycle import FATAL, Lifecycle
from volunteer.control.event_bus import EventBus
from volunteer.net.api import Api
from volunteer.net.retry import passing
from volunteer.net.transfers import Transfers
from volunteer.storage.evidence import EvidenceFiles, Request

PATIENCE_S = 600.0
AGAIN_S = 60.0  # wait before the next try after a temporary error


@dataclass(eq=False, kw_only=True)
class Revealer:
    """Uploads evidence while the work continues."""

    api: Api
    transfers: Transfers
    evidence: EvidenceFiles
    life: Lifecycle
    hub: EventBus

    async def run(self) -> None:
        """Upload requested evidence until cancelled."""
        while True:
            await self.life.until(lambda: bool(self.evidence.asked()))
            for request in self.evidence.asked():
                await self._reveal(request)

    async def _reveal(self, request: Request) -> None:
        try:
            for sha256 in request.files:
                await self._upload(request, sha256)
        except FATAL as error:
            self.life.give_up(error)
            await self.life.clock.sleep(AGAIN_S)
            return
        except VolunteerError as error:
            if passing(error):
                await self.life.clock.sleep(AGAIN_S)
                return
            self.hub.notice(
                Sentence(
                    "task {task} cannot be proved to the coordinator: {error}",
                    task=request.name.partition("-")[0],
                    error=error.message,
                ),
                "warning",
            )
        except FileNotFoundError:
            self.hub.notice(
                Sentence(
                    "a file that proves task {task} is lost: `volunteer forfeit` gives up the "
                    "pay at stake, so that this machine gets work again",
                    task=request.name.partition("-")[0],
                ),
                "warning",
            )
        self.evidence.drop(request.name)
        self.life.notify()

    async def _upload(self, request: Request, sha256: str) -> UploadInfo:
        path = self.evidence.file(sha256)
        task, attempt, part, tries = map(int, request.name.split("-"))
        wanted = UploadRequest(
            task=task,
            attempt=attempt,
            part=part,
            tries=tries,
            sha256=sha256,
            size=path.stat().st_size,
            evidence_of=request.contribution,
        )

        async def once() -> UploadInfo:
            return await self.transfers.upload(wanted, path, lambda done: None)

        return await self.api.client.retrying(once, PATIENCE_S)
