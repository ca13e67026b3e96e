"""A small engine behind the interface of inference engines: one token a character of a text that
follows from prompt and seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from coordinator.inference.inference_engine import (
    AnswerPiece,
    AnswerRule,
    ChatPrompt,
    Generation,
    ModelVersion,
    PreparedPrompt,
    TokenLogprob,
    TokenPrompt,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PNG = b"\x89PNG\r\n\x1a\n"


def expected(prompt: str, seed: int, count: int) -> str:
    """The text that the engine writes."""
    start = sum(prompt.encode()) + seed
    return "".join(LETTERS[(start + 7 * n) % 26] for n in range(count))


def _said(letter: str, at: int) -> TokenLogprob:
    return TokenLogprob(
        data=letter.encode(),
        logprob=-0.5 if at else None,
        top=((letter.encode(), -0.5),) * bool(at),
    )


class CountingEngine:
    """Writes letters; `gate`, where given, lets one token through each time it is released."""

    templates = False

    def __init__(self, context: int = 1000, gate: asyncio.Semaphore | None = None) -> None:
        self.context = context
        self.gate = gate
        self.open = 0
        self.closed = 0
        self.generated = 0
        self.scoring = 0  # prompts that were begun
        self.drawing = 0  # requests for pictures that were begun
        self.scored = 0  # tokens of prompts
        self.prepared = 0  # prompts, for which a real engine loads the model

    async def prepare(
        self,
        model: ModelVersion,
        prompt: str | TokenPrompt | ChatPrompt,
        probe: int | None = None,
        rule: AnswerRule | None = None,
    ) -> PreparedPrompt:
        self.prepared += 1
        text = bytes(prompt.tokens).decode() if isinstance(prompt, TokenPrompt) else str(prompt)
        if probe is not None:
            self.scoring += 1
            if self.gate is not None:
                await self.gate.acquire()
            self.scored += len(text)
        said = () if probe is None else tuple(map(_said, text, range(len(text))))
        return PreparedPrompt(
            tokens=tuple(text.encode()), context=self.context, text=text, logprobs=said
        )

    async def generate(self, request: Generation) -> AsyncIterator[AnswerPiece]:
        self.open += 1
        sequence, written = request.sequence, ""
        try:
            text = expected(bytes(sequence.prompt).decode(), sequence.seed, sequence.max_tokens)
            for number, letter in enumerate(text):
                if self.gate is not None:
                    await self.gate.acquire()
                else:
                    await asyncio.sleep(0)
                self.generated += 1
                written += letter
                said = (
                    TokenLogprob(
                        data=letter.encode(), logprob=-0.5, top=((letter.encode(), -0.5),)
                    ),
                )
                stopped = any(stop in written for stop in sequence.stop)
                last = number == len(text) - 1
                yield AnswerPiece(
                    text="" if stopped else letter,
                    tokens=(ord(letter),),
                    logprobs=() if sequence.logprobs is None else said,
                    finish="stop" if stopped else "length" if last else None,
                )
                if stopped:
                    return
        finally:
            self.open -= 1
            self.closed += 1

    async def images(self, model: ModelVersion, count: int, seed: int) -> Sequence[bytes]:
        self.drawing += 1
        if self.gate is not None:
            await self.gate.acquire()
        return [PNG + bytes([seed % 256, number]) for number in range(count)]

    async def close(self) -> None:
        return None
