"""Conversations as prompts, by the chat template of a model's tokenizer, in the inference process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

from coordinator.inference.engine import Turns, check_length
from shared.decoding import decode
from shared.errors import BadRequest
from shared.workloads.base import Reader
from shared.workloads.data.chat_template import ChatTemplate, Message
from shared.workloads.generation.prompt_text import ending

_RENDER_S = 2.0  # a template that takes longer holds up everybody's answers
_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


class Conversation:
    """Asks a model that learnt dialogues as it learnt them."""

    def __init__(self, template: Path, reader: Reader) -> None:
        """Read a template as a dataset keeps it. Raises InvalidRunFile for a broken one."""
        self._reader = reader
        self._template = decode(template.read_bytes(), ChatTemplate)
        with _soon():
            frame = self._template.frame()
        end = frame.end if frame is not None else self._template.eos_token
        self.ends, self.stop = ending(reader, end)  # of an answer

    def tokens(self, turns: Turns) -> tuple[int, ...]:
        """Return turns up to where the answer begins. Raises BadRequest for what the template
        refuses, or what is too long.
        """
        check_length(sum(len(text) for _, text in turns), self._reader.context)
        with _soon():
            text = self._template.asked([Message(_ROLES[role], text) for role, text in turns])
        check_length(len(text), self._reader.context)
        return tuple(self._reader.encode(text, marks=True))


@contextmanager
def _soon() -> Iterator[None]:
    """Raise BadRequest on the main thread where something takes too long."""
    before = signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, _RENDER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _too_long(*_: object) -> NoReturn:
    raise BadRequest("the chat template of this model does not come to an end")
