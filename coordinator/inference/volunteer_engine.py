"""Inference engine on volunteers' machines, with the local engine if no machine answers.

The local engine tokenizes prompts and compares answers. If an answer breaks off, another machine
continues it from its last token; since a token's random number depends only on the seed and the
token's place, the answer is the same. Drawn answers are compared afterwards (see `answer_draws`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
import structlog

from coordinator.inference.answer_draws import AnswerDraws
from coordinator.inference.answerers import Answerers, AnswerPart, SilentMachine
from coordinator.inference.builtin_engine import BuiltinEngine
from coordinator.inference.inference_engine import (
    AnswerPiece,
    AnswerRule,
    ChatPrompt,
    Generation,
    ModelVersion,
    PreparedPrompt,
    TokenPrompt,
)
from coordinator.inference.run_text import RunText
from shared.protocol.inference import AnswerTask
from shared.workloads.generation.prompt_text import PromptText
from shared.workloads.generation.text_stream import TextStream

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from coordinator.database.engine.open_database import Database
    from coordinator.storage.blobs import BlobStore
    from shared.protocol.versions import SignedManifest

TRIES_MAX = 3  # machines that are asked for one answer
TEXTS_MAX = 64  # tokenizers that are cached

log = structlog.get_logger("answers")


class VolunteerEngine:
    """Inference engine on volunteers' machines; see `InferenceEngine`."""

    def __init__(
        self,
        engine: BuiltinEngine,
        answerers: Answerers,
        draws: AnswerDraws,
        db: Database,
        blobs: BlobStore,
        manifest: Callable[[str, int], Awaitable[SignedManifest]],
    ) -> None:
        self._engine = engine
        self._answerers = answerers
        self._db, self._blobs = db, blobs
        self._manifest = manifest
        self._draws = draws
        draws.connect(engine.compare)
        self._texts: dict[str | bytes, PromptText] = {}  # keyed by `RunText.key`

    @property
    def templates(self) -> bool:
        return self._engine.templates

    async def prepare(
        self,
        model: ModelVersion,
        prompt: str | TokenPrompt | ChatPrompt,
        probe: int | None = None,
        rule: AnswerRule | None = None,
    ) -> PreparedPrompt:
        return await self._engine.prepare(model, prompt, probe, rule)

    async def images(self, model: ModelVersion, count: int, seed: int) -> Sequence[bytes]:
        return await self._engine.images(model, count, seed)

    async def close(self) -> None:
        """End comparisons and the local engine."""
        await self._draws.close()
        await self._engine.close()

    async def generate(self, request: Generation) -> AsyncGenerator[AnswerPiece]:
        # the protocol carries neither probabilities nor shaped logits nor grammars
        sequence = request.sequence
        is_plain = sequence.logprobs is None and sequence.shaping is None and not sequence.grammar
        if not (request.volunteers and is_plain and self._answerers.waiting):
            async with aclosing(self._engine.generate(request)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        text = await self._text(request.model)
        answer = _Answer(request, text)
        tried = {request.asker}
        for _ in range(TRIES_MAX):
            part = await self._begin(answer, tried)
            if part is None:
                break
            tried.add(part.volunteer_id)
            remaining = answer.remaining()
            silent = False
            try:
                async with aclosing(part.stream()) as tokens:
                    async for token in tokens:
                        # the token is outside the vocabulary, so no other machine could continue
                        # from it
                        if token >= request.vocabulary > 0:
                            raise SilentMachine
                        yield answer.add(token, part.volunteer_id)
                        if answer.ended:
                            return
                yield answer.end(part.finish)
                return
            except SilentMachine:
                silent = True
                log.info("another machine continues an answer", worker=part.worker_id)
            finally:
                self._answerers.end(part, silent=silent)
                self._draws.keep(remaining, part)
        async with aclosing(self._engine.generate(answer.remaining())) as pieces:
            async for piece in pieces:
                for token in piece.tokens:
                    yield answer.add(token)
                    if answer.ended:
                        return
                if piece.finish:
                    yield answer.end(piece.finish)
                    return

    async def _begin(self, answer: _Answer, tried: set[str]) -> AnswerPart | None:
        request = answer.remaining()
        model, rest = request.model, request.sequence
        task = AnswerTask(
            prompt=rest.prompt,
            max_tokens=rest.max_tokens,
            seed=rest.seed,
            place=rest.place,
            temperature=rest.temperature,
            top_p=rest.top_p,
            id="",
            manifest=await self._manifest(model.run, model.version),
            end=rest.ends[0] if rest.ends else None,
        )
        return self._answerers.begin(model.run, task, excluded=tried | self._draws.busy)

    async def _text(self, model: ModelVersion) -> PromptText:
        """Return the decoder from a run's tokens to text."""
        reading = await self._db.read(lambda conn: RunText.of_run(conn, model.run_id))
        text = self._texts.get(reading.key)
        if text is None:
            data = await reading.tokenizer(self._blobs)
            text = await asyncio.to_thread(PromptText, data, 0)
            while len(self._texts) >= TEXTS_MAX:
                del self._texts[next(iter(self._texts))]
            self._texts[reading.key] = text
        return text


class _Answer:
    """Answer whose tokens come from one machine after another."""

    def __init__(self, request: Generation, text: PromptText) -> None:
        self._request = request
        self._stream = TextStream(text.decode, request.sequence.stop)
        self._tokens: list[int] = []
        self._has_end = False  # True once a token came that ends the answer

    @property
    def ended(self) -> bool:
        return self._has_end or self._stream.stopped

    def remaining(self) -> Generation:
        """Return the order for the tokens that the answer still lacks."""
        sequence, tokens = self._request.sequence, tuple(self._tokens)
        rest = msgspec.structs.replace(
            sequence,
            prompt=(*sequence.prompt, *tokens),
            max_tokens=sequence.max_tokens - len(tokens),
            place=sequence.place + len(tokens),
        )
        return msgspec.structs.replace(self._request, sequence=rest)

    def add(self, token: int, by: str = "") -> AnswerPiece:
        if token in self._request.sequence.ends:
            # a machine knows one end of an answer, and the model may have several
            self._has_end = True
            return self.end("stop")
        self._tokens.append(token)
        text = self._stream.add(token)
        return AnswerPiece(text=text, tokens=(token,), finish="stop" if self.ended else None, by=by)

    def end(self, finish: str) -> AnswerPiece:
        return AnswerPiece(text=self._stream.end(), finish="stop" if finish == "stop" else "length")
