"""Prompts of this machine's owner: sent, streamed, and remembered here only."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared.errors import Conflict, NotFound, TooLarge, VolunteerError, why
from shared.protocol.inference import ImageRequest, Usage
from shared.sentences import Sentence, figure
from volunteer.control.commands import Answer, AskModel, Drawn, PastPrompt
from volunteer.files import read_record, write_record
from volunteer.net.client import Client
from volunteer.net.prompt_api import streamed

if TYPE_CHECKING:
    from volunteer.net.api import Api

log = logging.getLogger(__name__)

RUNNING_MAX = 4
KEPT = 8  # ended answers that may still be read
PAST_MAX = 50  # prompts that are remembered
CHARS_MAX = 2_000  # of a remembered prompt or answer
ANSWER_CHARS_MAX = 1 << 20  # a coordinator could send words without end
IMAGE_BYTES_MAX = 2 << 20  # shown pictures; a line of the local socket has 4 MiB
POLL_S = 10.0


class PastPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """File of remembered prompts, the newest last."""

    prompts: tuple[PastPrompt, ...] = ()


class _RunningAnswer:
    """One answer being received."""

    def __init__(self) -> None:
        self.text = ""
        self.used: Usage | None = None
        self.error = ""
        self.done = False
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Condition()


class Prompts:
    """Sends prompts to the coordinator's models, at most `RUNNING_MAX` at once."""

    def __init__(self, client: Client, path: Path) -> None:
        self._client = client
        self._path = path
        self._ids = itertools.count(1)
        self._answers: dict[int, _RunningAnswer] = {}

    def ask(self, command: AskModel) -> int:
        """Begin an answer and return its number.

        Raises Conflict while too many are on their way.
        """
        if sum(not each.done for each in self._answers.values()) >= RUNNING_MAX:
            raise Conflict(
                Sentence(
                    "{n} answers are on their way: wait for one, or stop it",
                    n=RUNNING_MAX,
                )
            )
        ended = [number for number, each in self._answers.items() if each.done]
        for number in ended[: max(0, len(ended) - KEPT)]:
            del self._answers[number]
        number, answer = next(self._ids), _RunningAnswer()
        self._answers[number] = answer
        answer.task = asyncio.create_task(self._run(answer, command), name="ask-model")
        return number

    async def read(self, number: int, seen: int) -> Answer:
        """Return the answer after the first `seen` characters, as soon as it has grown.

        Raises NotFound.
        """
        answer = self._found(number)
        async with answer.changed:
            if not answer.done and len(answer.text) <= seen:
                try:
                    async with asyncio.timeout(POLL_S):
                        await answer.changed.wait()
                except TimeoutError:
                    pass
        return Answer(
            text=answer.text[seen:], done=answer.done, used=answer.used, error=answer.error
        )

    async def stop(self, number: int) -> None:
        """End an answer; its generated tokens are paid. Raises NotFound."""
        answer = self._found(number)
        if answer.task is not None and not answer.task.done():
            answer.task.cancel()
            await asyncio.gather(answer.task, return_exceptions=True)
        if not answer.done:  # it had not even begun
            await _end(answer, Sentence("stopped"))

    async def close(self) -> None:
        """End every answer."""
        for number in list(self._answers):
            await self.stop(number)

    def past(self) -> tuple[PastPrompt, ...]:
        """Return the remembered prompts, the newest last."""
        found = read_record(self._path, PastPrompts)
        return found.prompts if found else ()

    def forget(self) -> None:
        """Erase the remembered prompts."""
        self._path.unlink(missing_ok=True)

    def _found(self, number: int) -> _RunningAnswer:
        answer = self._answers.get(number)
        if answer is None:
            raise NotFound(Sentence("this answer is no longer kept: ask again"))
        return answer

    async def _run(self, answer: _RunningAnswer, command: AskModel) -> None:
        error = ""
        try:
            await self._stream(answer, command)
        except VolunteerError as said:
            error = said.message
        except asyncio.CancelledError:
            error = Sentence("stopped")
        except Exception as fault:  # whoever reads must not wait for ever
            log.exception("an answer failed")
            error = Sentence("the answer failed: {fault}", fault=why(fault))
        not_kept = self._remember(command, answer) if answer.text else ""
        await _end(answer, error or not_kept)

    async def _stream(self, answer: _RunningAnswer, command: AskModel) -> None:
        async for chunk in streamed(self._client, "/v1/completions", _body(command)):
            answer.used = chunk.usage or answer.used
            answer.text += "".join(choice.words for choice in chunk.choices)
            if len(answer.text) > ANSWER_CHARS_MAX:
                raise TooLarge(
                    Sentence(
                        "the answer is longer than {n} characters",
                        n=figure(f"{ANSWER_CHARS_MAX:,}"),
                    )
                )
            async with answer.changed:
                answer.changed.notify_all()

    def _remember(self, command: AskModel, answer: _RunningAnswer) -> str:
        """Remember a prompt and its answer; return the reason where that failed."""
        new = PastPrompt(
            model=command.model,
            prompt=command.prompt[:CHARS_MAX],
            text=answer.text[:CHARS_MAX],
            cost_micro=answer.used.cost_micro if answer.used else None,
        )
        try:
            write_record(self._path, PastPrompts(prompts=(*self.past(), new)[-PAST_MAX:]))
        except (VolunteerError, OSError) as error:
            said = error.message if isinstance(error, VolunteerError) else why(error)
            return Sentence("not remembered: {error}", error=said)
        return ""


async def drawn(api: Api, model: str, seed: int | None) -> Drawn:
    """Return a picture of an image run and its price. Raises the coordinator's errors."""
    reply = await api.images(ImageRequest(model=model, seed=seed))
    images = tuple(each.b64_json for each in reply.data)
    if sum(map(len, images)) > IMAGE_BYTES_MAX:
        raise TooLarge(
            Sentence("the picture is too large to be shown: `volunteer generate` writes it")
        )
    return Drawn(images=images, cost_micro=reply.usage.cost_micro)


async def _end(answer: _RunningAnswer, error: str) -> None:
    answer.error, answer.done = error, True
    async with answer.changed:
        answer.changed.notify_all()


def _body(command: AskModel) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": command.model,
        "prompt": command.prompt,
        "temperature": command.temperature,
        "top_p": command.top_p,
    }
    given = {
        "max_tokens": command.max_tokens,
        "seed": command.seed,
        "answered_by": "organiser" if command.private else None,
    }
    return body | {name: value for name, value in given.items() if value is not None}
