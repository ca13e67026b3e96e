"""Conversations as prompts, by the chat template of a model's tokenizer, in the inference process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from coordinator.inference.inference_engine import Turns, check_length
from shared.decoding import decode
from shared.workloads.base import Reader
from shared.workloads.data.chat_template import ChatTemplate, DialogueTurn
from shared.workloads.generation.prompt_text import ending

_ROLES: dict[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


class Conversation:
    """Asks a model that learnt dialogues as it learnt them."""

    def __init__(self, template: Path, reader: Reader) -> None:
        """Read a template as a dataset keeps it. Raises InvalidRunFile where that cannot be."""
        self._reader = reader
        self._template = decode(template.read_bytes(), ChatTemplate)
        frame = self._template.frame()
        end = frame.end if frame is not None else self._template.eos_token
        self.ends, self.stop = ending(reader, end)  # of an answer

    def tokens(self, turns: Turns) -> tuple[int, ...]:
        """Return turns up to where the answer begins. Raises BadRequest for what the template
        refuses, or what is too long.
        """
        check_length(sum(len(text) for _, text in turns), self._reader.context)
        text = self._template.asked([DialogueTurn(_ROLES[role], text) for role, text in turns])
        check_length(len(text), self._reader.context)
        return tuple(self._reader.encode(text, marks=True))
