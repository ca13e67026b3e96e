"""Answers to prompts between training steps, if the owner agreed: the machine offers itself, pauses
its training between two micro-batches, and streams the tokens.

A prompt is held in memory while it is answered, and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import Forbidden, InvalidFrame, NotFound, VolunteerError
from shared.protocol import endpoints
from shared.protocol.inference import SENT_TOKENS_MAX, AnswerOffer, AnswerTask, AnswerTokens
from shared.protocol.limits import LONG_POLL_S_MAX
from shared.protocol.versions import BlobRef, VersionManifest
from shared.sentences import Sentence
from shared.workloads.base import Workload
from volunteer.agent.downloads import blob_of
from volunteer.agent.pause_board import PauseBoard
from volunteer.agent.run_choice import RunChoice
from volunteer.agent.workplace import LentDevice, Workplace
from volunteer.net.api import POLL_S
from volunteer.net.retry import is_temporary
from volunteer.storage.manifests import verified_manifest
from volunteer.training.answer_model import AnswerFiles, AnswerModel

if TYPE_CHECKING:
    from shared.workloads.generation.batch import Finish

GATHER_S = 0.05  # tokens that come within this time are sent together
AGAIN_S = 30.0  # wait before the next offer after an error
FAILED_S = 120.0  # wait after a failure of this machine, which may come again
UNVETTED_S = 600.0  # wait after the coordinator refused an offer
CONTEXT_MAX = 1 << 20  # longest prompt that is answered, in tokens


@dataclass(eq=False, kw_only=True)
class Answering:
    """Offers the first lent device that is not paused to the coordinator, and answers prompts on
    it.
    """

    place: Workplace
    devices: Sequence[LentDevice]
    pauses: PauseBoard
    choice: RunChoice
    load: Callable[[str], Workload]
    _models: dict[str, AnswerModel] = field(default_factory=dict, init=False)  # by device
    _announced: bool = field(default=False, init=False)

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self.place.life.until(lambda: self._free_device() is not None)
            try:
                body = AnswerOffer(runs=self.choice.runs() or (), wait_s=LONG_POLL_S_MAX)
                api = self.place.remote.api
                offer = api.call(endpoints.ANSWER_OFFER, body=body, timeout_s=POLL_S)
                work = await self.place.life.unless(lambda: self._free_device() is None, offer)
                if work is not None and work.task is not None:
                    await self._answer(work.task)
            # the account is not vetted, or the coordinator has no such work
            except (Forbidden, NotFound) as error:
                if not self._announced:
                    self._announced = True
                    self.place.bus.notice(Sentence("no prompts yet: {error}", error=error.message))
                await self.place.life.clock.sleep(UNVETTED_S)
            except VolunteerError as error:
                if not is_temporary(error):
                    self.place.bus.notice(
                        Sentence("a prompt was not answered: {error}", error=error.message),
                        "warning",
                    )
                await self.place.life.clock.sleep(AGAIN_S)
            except Exception as error:  # a full memory, or a fault of the workload
                kind = type(error).__name__  # its text could quote the prompt
                self.place.bus.notice(
                    Sentence("a prompt was not answered: {error}", error=kind), "warning"
                )
                await self.place.life.clock.sleep(FAILED_S)

    def _free_device(self) -> LentDevice | None:
        if self.place.life.winding_up or self.choice.runs() is None:
            return None
        free = (device for device in self.devices if not self.pauses.paused(device.id))
        return next(free, None)

    async def _answer(self, task: AnswerTask) -> None:
        """Answer one prompt; on a failure the coordinator asks another machine."""
        device = self._free_device()
        try:
            if device is None or not 0 < len(task.prompt) <= CONTEXT_MAX:
                raise InvalidFrame(Sentence("this machine cannot read this prompt"))
            manifest = verified_manifest(task.manifest, self.place.remote.identity.public_key)
            with ExitStack() as stack:
                version = await self._fetch_files(manifest, stack)
                await self._stream(task, device, version)
        except BaseException as error:
            failure = AnswerTokens(start=0, finish="failed")
            if not isinstance(error, asyncio.CancelledError):
                await self.place.remote.api.answer_tokens(task.id, failure)
            raise

    async def _fetch_files(self, manifest: VersionManifest, stack: ExitStack) -> AnswerFiles:
        """Fetch a version's files; the cache keeps them until `stack` closes."""
        workload, remote = self.load(manifest.workload), self.place.remote
        run_files = workload.files(manifest.config)
        files = {name: blob_of(chunk) for name, chunk in run_files.items()}
        hashes = [manifest.weights.sha256, *(ref.sha256 for ref in files.values())]
        stack.enter_context(self.place.store.cache.hold(hashes))
        origin = workload.origin(manifest.config) if run_files else None
        public = origin.paths if origin else {}

        async def fetch(ref: BlobRef) -> Path:
            path = public.get(ref.sha256, "")
            return await remote.transfers.fetch(ref, lambda done: None, path)

        return AnswerFiles(
            sha256=manifest.weights.sha256,
            workload=workload,
            config=manifest.config,
            weights=await remote.weights.fetch(manifest, lambda total: lambda done: None),
            files={name: await fetch(ref) for name, ref in files.items()},
        )

    async def _stream(self, task: AnswerTask, device: LentDevice, version: AnswerFiles) -> None:
        """Generate on the device's thread, and send the new tokens in batches.

        A pause ends the answer before its next token, and the coordinator asks another machine.
        """
        loop = asyncio.get_running_loop()
        model = self._models.setdefault(device.id, AnswerModel(device.id))
        tokens: list[int] = []
        go_on = True

        def generate() -> Finish | None:
            """Generate the tokens, on the thread of the device; return why the answer ended, None
            if it was stopped earlier.
            """
            for token in model.answer(version, task):
                if token.chosen is not None:
                    loop.call_soon_threadsafe(tokens.append, token.chosen.token)
                if token.finish or not go_on:
                    return token.finish
            return None

        working = asyncio.wrap_future(device.trainer.interject(generate))
        sent = 0
        try:
            ended = False
            while go_on and not ended:
                await asyncio.wait((working,), timeout=GATHER_S)
                if self.pauses.paused(device.id):
                    raise InvalidFrame(
                        Sentence("this machine was paused in the middle of an answer")
                    )
                batch = tuple(tokens[sent : sent + SENT_TOKENS_MAX])
                ended = working.done() and sent + len(batch) == len(tokens)
                finish = (working.result() or "failed") if ended else ""
                if batch or ended:
                    part = AnswerTokens(start=sent, tokens=batch, finish=finish)
                    go_on = await self.place.remote.api.answer_tokens(task.id, part)
                    sent += len(batch)
        finally:
            go_on = False
            working.add_done_callback(_take_exception)


def _take_exception(working: asyncio.Future[Any]) -> None:
    if not working.cancelled():
        working.exception()
