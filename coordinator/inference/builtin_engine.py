"""Built-in inference engine: a child process loads versions and generates their answers.

The process starts with the first prompt. When it dies, its running answers raise Unavailable, and
so do prompts for a time that doubles with each death in a row. The first prompt after that time
starts a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from coordinator.compute import half_the_cores
from coordinator.database import datasets, runs, versions
from coordinator.inference import process_messages
from coordinator.inference.inference_engine import (
    AnswerPiece,
    AnswerRule,
    ChatPrompt,
    Generation,
    InvalidField,
    ModelVersion,
    PreparedPrompt,
    TokenPrompt,
)
from coordinator.runs.definition import definition
from shared.clock import Clock
from shared.decoding import MALFORMED
from shared.errors import BY_CODE, Internal, Unavailable
from shared.workloads.base import ChunkRef
from shared.workloads.data.chat_template import TEMPLATE
from shared.workloads.generation import batch

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.config import Settings
    from coordinator.database.engine.open_database import Database
    from coordinator.database.runs import RunRow
    from coordinator.storage.blobs import BlobStore

T = TypeVar("T")

RESTART_S, RESTART_MAX_S = 1.0, 60.0  # pause after a first death, and the longest pause

log = structlog.get_logger("inference")


class ProcessLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Threads and memory that the process may take, and the device that it uses."""

    threads: int = 0  # 0 = half the cores
    memory_bytes: int = 0  # 0 = half of the memory
    device: str = "cpu"

    @classmethod
    def of(cls, settings: Settings) -> ProcessLimits:
        """Return the resources that the settings allow."""
        return cls(
            threads=settings.inference_threads,
            memory_bytes=settings.inference_memory_bytes,
            device=settings.inference_device,
        )


class BuiltinEngine:
    """Inference engine in a worker process of this server; see `InferenceEngine`."""

    templates = True

    def __init__(
        self, db: Database, clock: Clock, blobs: BlobStore, limits: ProcessLimits | None = None
    ) -> None:
        self._db = db
        self._clock = clock
        self._blobs = blobs
        self._limits = limits or ProcessLimits()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Queue[process_messages.Event | None]] = {}
        self._starting = asyncio.Lock()
        self._deaths, self._rest_until = 0, 0.0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the process's id; None if no process runs."""
        return None if self._writer is None or self._process is None else self._process.pid

    async def prepare(
        self,
        model: ModelVersion,
        prompt: str | TokenPrompt | ChatPrompt,
        probe: int | None = None,
        rule: AnswerRule | None = None,
    ) -> PreparedPrompt:
        files = await self._files(model)
        tokens = prompt.tokens if isinstance(prompt, TokenPrompt) else ()
        text = "" if isinstance(prompt, TokenPrompt) else prompt
        order = process_messages.Prepare(
            id=_id(), model=files, prompt=text, tokens=tokens, probe=probe, rule=rule
        )
        async with self._exchange(order) as events:
            return (await _next(events, process_messages.TokenizedPrompt)).prompt

    async def generate(self, request: Generation) -> AsyncGenerator[AnswerPiece]:
        files = await self._files(request.model)
        order = process_messages.Generate(model=files, sequence=_renamed(request.sequence))
        async with self._exchange(order) as events:
            while True:
                piece = (await _next(events, process_messages.GeneratedPiece)).piece
                yield piece
                if piece.finish:
                    return

    async def compare(
        self, request: Generation, tokens: Sequence[int], *, ended: bool
    ) -> tuple[int, int]:
        """Return the number of compared tokens of an answer, and of tokens among these that the
        version would not have chosen. `ended` says that the answer ended after these tokens.
        """
        order = process_messages.Compare(
            id=_id(),
            model=await self._files(request.model),
            sequence=_renamed(request.sequence),
            tokens=tuple(tokens),
            ended=ended,
        )
        async with self._exchange(order) as events:
            comparison = await _next(events, process_messages.Comparison)
        return comparison.compared, comparison.wrong

    async def images(self, model: ModelVersion, count: int, seed: int) -> Sequence[bytes]:
        files = await self._files(model)
        order = process_messages.DrawPictures(id=_id(), model=files, count=count, seed=seed)
        async with self._exchange(order) as events:
            return (await _next(events, process_messages.DrawnPictures)).images

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        async with self._starting:  # also ends a process that was just starting
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        if self._reading is not None:
            await self._reading

    # --- the process ---

    @contextlib.asynccontextmanager
    async def _exchange(self, order: process_messages.Question) -> AsyncIterator[_Events]:
        """Send an order and yield its events; leaving the block cancels a running generation."""
        events: _Events = asyncio.Queue()
        writer = await self._connected()
        self._waiting[order.id] = events
        try:
            await _send(writer, order)
            yield events
        finally:
            del self._waiting[order.id]
            if isinstance(order, process_messages.Generate) and writer is self._writer:
                with contextlib.suppress(Unavailable):
                    await _send(writer, process_messages.Cancel(id=order.id))

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._writer is not None:
                return self._writer
            rest = self._rest_until - self._clock.monotonic()
            if self._closed or rest > 0:
                raise Unavailable("answers are not computed at the moment", retry_after_s=rest + 1)
            near, far = socket.socketpair()
            with far:
                reader, writer = await asyncio.open_connection(sock=near)
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        sys.executable,
                        "-m",
                        "coordinator.inference.inference_process",
                        str(far.fileno()),
                        str(self._limits.threads or half_the_cores()),
                        str(self._limits.memory_bytes),
                        self._limits.device,
                        pass_fds=[far.fileno()],
                        stdin=asyncio.subprocess.DEVNULL,
                    )
                except BaseException as error:
                    writer.close()
                    if not isinstance(error, OSError):
                        raise
                    why = f"no process for answers: {error}"
                    raise Unavailable(why, retry_after_s=60) from error
            self._reading = asyncio.create_task(self._listen(reader, writer))
            self._writer = writer
            return writer

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass events to their waiting orders, until the process ends or sends a malformed one."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, *MALFORMED):
            while True:
                (size,) = process_messages.HEAD.unpack(
                    await reader.readexactly(process_messages.HEAD.size)
                )
                if size > process_messages.FRAME_BYTES_MAX:
                    break
                event = process_messages.EVENTS.decode(await reader.readexactly(size))
                self._deaths = 0
                if (events := self._waiting.get(event.id)) is not None:
                    events.put_nowait(event)
        self._writer = None
        writer.close()
        self._rest_until = self._clock.monotonic() + min(
            RESTART_MAX_S, RESTART_S * 2.0 ** min(16, self._deaths)
        )
        self._deaths += 1
        for events in self._waiting.values():
            events.put_nowait(None)
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        await self._reap()

    async def _reap(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        code = await self._process.wait()
        if not self._closed:
            log.warning("process died", process="inference", code=code)

    # --- the files ---

    async def _files(self, model: ModelVersion) -> process_messages.ModelFiles:
        """Return the files that load a version. Raises Unavailable if they are gone."""

        def look(conn: Connection) -> tuple[RunRow, str, Mapping[str, ChunkRef]]:
            run = runs.by_id(conn, model.run_id)
            weights = versions.get(conn, run.id, model.version).published_sha256
            return run, weights, datasets.assets_of(conn, run)

        run, weights, assets = await self._db.read(look)
        about = definition(run)
        more = about.workload.files(about.file.model)
        return process_messages.ModelFiles(
            key=weights,
            file=run.file,
            weights=str(await self._blobs.local(weights)),
            tokenizer=await self._local(about.tokenizer(assets)),
            template=await self._local(assets.get(TEMPLATE)),
            files={name: str(await self._blobs.local(ref.sha256)) for name, ref in more.items()},
        )

    async def _local(self, ref: ChunkRef | None) -> str | None:
        return None if ref is None else str(await self._blobs.local(ref.sha256))


_Events = asyncio.Queue[process_messages.Event | None]


def _renamed(sequence: batch.Sequence) -> batch.Sequence:
    """Return a sequence with a new id, since two callers may give their sequences the same id."""
    return msgspec.structs.replace(sequence, id=_id())


def _id() -> str:
    return secrets.token_hex(8)


async def _send(writer: asyncio.StreamWriter, order: process_messages.Order) -> None:
    try:
        writer.write(process_messages.framed(order))
        await writer.drain()
    except OSError as error:
        raise Unavailable("the answer broke off", retry_after_s=RESTART_S) from error


async def _next(events: _Events, expected: type[T]) -> T:
    """Return the next event, of the `expected` kind. Raises the error of an order that failed,
    Unavailable if the process ended, Internal for an event of another kind.
    """
    event = await events.get()
    if event is None:
        raise Unavailable("the answer broke off", retry_after_s=RESTART_S)
    if isinstance(event, process_messages.OrderFailed):
        if event.param:
            raise InvalidField(event.message, event.param)
        kind = BY_CODE.get(event.code, Internal)
        raise kind(event.message, retry_after_s=event.retry_after_s)
    if not isinstance(event, expected):
        raise Internal("the inference process gave an answer of the wrong kind")
    return event
