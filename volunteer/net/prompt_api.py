"""Prompts to a run's model, over the OpenAI-compatible interface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from shared.errors import Internal
from shared.protocol.inference import OpenAiError, Usage
from shared.sentences import Sentence
from volunteer.net.reply_errors import decode_reply, openai_error

if TYPE_CHECKING:
    from volunteer.net.client import Client

EVENT_BYTES_MAX = 1 << 20
DATA, DONE = b"data: ", b"[DONE]"


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Next piece of a chat answer."""

    content: str | None = None


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Next piece of one completion."""

    text: str = ""
    delta: AnswerDelta = AnswerDelta()
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        return self.text or self.delta.content or ""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    model: str = ""
    choices: tuple[CompletionChoice, ...] = ()
    usage: Usage | None = None
    error: OpenAiError | None = None


async def stream_answer(client: Client, path: str, body: dict[str, object]) -> AsyncIterator[Chunk]:
    """Yield the events of an answer, `usage` last. Raises the coordinator's error, and Internal for
    an invalid or unfinished answer.
    """
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.events(path, msgspec.json.encode(request)) as pieces:
        rest = b""
        async for piece in pieces:
            *lines, rest = (rest + bytes(piece)).split(b"\n")
            if len(rest) > EVENT_BYTES_MAX:
                raise Internal(
                    Sentence("the coordinator's reply is invalid: an event without an end")
                )
            for line in lines:
                if not line.startswith(DATA):
                    continue
                if line == DATA + DONE:
                    return
                chunk = decode_reply(line.removeprefix(DATA), Chunk)
                if chunk.error is not None:
                    raise openai_error(0, chunk.error)
                yield chunk
    raise Internal(Sentence("the answer broke off before its end"))
