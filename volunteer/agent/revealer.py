"""Revealer: uploads the states from which a task can be recomputed, if the coordinator asks."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import VolunteerError
from shared.protocol.contributions import UploadInfo, UploadRequest
from shared.sentences import Sentence
from volunteer.agent.collaborators import Workplace
from volunteer.agent.lifecycle import FATAL
from volunteer.net.retry import passing
from volunteer.storage.evidence import Request

PATIENCE_S = 600.0
AGAIN_S = 60.0  # wait before the next try after a temporary error


@dataclass(eq=False, kw_only=True)
class Revealer:
    """Uploads evidence while the work continues."""

    place: Workplace

    async def run(self) -> None:
        """Upload requested evidence until cancelled."""
        while True:
            await self.place.life.until(lambda: bool(self.place.store.evidence.asked()))
            for request in self.place.store.evidence.asked():
                await self._reveal(request)

    async def _reveal(self, request: Request) -> None:
        try:
            for sha256 in request.files:
                await self._upload(request, sha256)
        except FATAL as error:
            self.place.life.give_up(error)
            await self.place.life.clock.sleep(AGAIN_S)
            return
        except VolunteerError as error:
            if passing(error):
                await self.place.life.clock.sleep(AGAIN_S)
                return
            self.place.hub.notice(
                Sentence(
                    "task {task} cannot be proved to the coordinator: {error}",
                    task=request.name.partition("-")[0],
                    error=error.message,
                ),
                "warning",
            )
        except FileNotFoundError:
            self.place.hub.notice(
                Sentence(
                    "a file that proves task {task} is lost: `volunteer forfeit` gives up the "
                    "pay at stake, so that this machine gets work again",
                    task=request.name.partition("-")[0],
                ),
                "warning",
            )
        self.place.store.evidence.drop(request.name)
        self.place.life.notify()

    async def _upload(self, request: Request, sha256: str) -> UploadInfo:
        path = self.place.store.evidence.file(sha256)
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
            return await self.place.remote.transfers.upload(wanted, path, lambda done: None)

        return await self.place.remote.api.client.retrying(once, PATIENCE_S)
