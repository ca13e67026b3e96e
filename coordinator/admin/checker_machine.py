"""Checker, a machine of the organiser's: takes recomputes from a coordinator, runs them on a device
of this machine, and reports the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog

from coordinator.admin import checker_commands
from coordinator.admin.checker_commands import HeldRecompute, ReportRecompute, TakeRecompute
from coordinator.admin.command import CommandSender
from coordinator.checking.case import BlobSource
from coordinator.checking.checkers import CheckerOutcome, CheckerVerdict
from coordinator.checking.recompute_comparison import RecomputeFiles, missing_library, redo
from coordinator.checking.recompute_queue import RecomputeTask
from coordinator.compute import Compute
from coordinator.rules.draws import HOLD_S, ComputeDevice
from shared.errors import (
    Conflict,
    NotFound,
    Unavailable,
    Unreachable,
    VolunteerError,
    why,
)
from shared.files.deletions import delete_file

if TYPE_CHECKING:
    from coordinator.admin.remote_server import RemoteServer

CACHE_BYTES = 8 << 30  # fetched blobs that are kept for later tasks
TRIES, AGAIN_S = 9, 1.0  # retries of an unreachable server: four minutes in all
POLL_S = 10.0  # interval of asking for work
RENEW_S = HOLD_S / 6
GIVEN_BACK = "given back"
RESULTS = ("passed", "failed", "unproven", GIVEN_BACK)
T = TypeVar("T")

log = structlog.get_logger("checker")


class BlobFolder:
    """Blobs of a running server as files of a folder; the least recently used are deleted first."""

    def __init__(self, server: RemoteServer, folder: Path, most: int = CACHE_BYTES) -> None:
        self._server = server
        self._folder = folder
        self._most = most

    async def local(self, sha256: str) -> Path:
        """Return the file of a blob. Raises the server's errors."""
        path = self._folder / sha256
        if path.exists():
            path.touch()
            return path
        partial = self._folder / f"{sha256}.part"
        await patiently(lambda: asyncio.to_thread(self._server.blob, sha256, partial))
        return partial.replace(path)

    def tidy(self) -> None:
        """Delete the least recently used files above `most` bytes; called between two tasks."""
        files = sorted(
            ((path.stat().st_mtime, path) for path in self._folder.iterdir()), reverse=True
        )
        size = 0
        for _, path in files:
            size += path.stat().st_size
            if size > self._most:
                delete_file(path, "copy")


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Return a server's answer; retry for four minutes while it cannot be reached."""
    for tried in range(1, TRIES):
        try:
            return await ask()
        except (Unreachable, Unavailable) as error:
            log.warning("the coordinator cannot be reached", error=error.message, tried=tried)
            await asyncio.sleep(AGAIN_S * 2 ** (tried - 1))
    return await ask()


class CheckerResult(msgspec.Struct, frozen=True, kw_only=True):
    """Checker's report of one recompute."""

    contribution: int
    run: str
    result: str  # result of the recompute, or "given back"
    message: str
    seconds: float


class CheckerStep(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a recompute."""

    contribution: int
    run: str
    step: int
    steps: int


class CheckerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a checker's work."""

    results: dict[str, int]
    seconds: float  # seconds spent on recomputes


class Checker:
    """Checker on one device. `of` is its name, its device and the device's class; `tell` receives
    progress and results.
    """

    def __init__(
        self,
        ask: CommandSender,
        blobs: BlobSource,
        compute: Compute,
        of: tuple[str, str, ComputeDevice],
        tell: Callable[[CheckerStep | CheckerResult], None],
    ) -> None:
        self._ask = ask
        self._blobs = blobs
        self._compute = compute
        self._name, self._device, self._machine = of
        self._tell = tell
        self._results = dict.fromkeys(RESULTS, 0)
        self._seconds = 0.0
        self._trouble = ""  # the checker's own fault in its newest task

    @property
    def summary(self) -> CheckerSummary:
        return CheckerSummary(results=self._results, seconds=self._seconds)

    async def run(self, stop: asyncio.Event, *, once: bool = False) -> None:
        """Run recomputes until `stop`, or with `once` until none waits for this checker. A running
        recompute is given back at the stop.
        """
        while not stop.is_set():
            if await self.next(stop):
                continue
            if once:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_S)

    async def next(self, stop: asyncio.Event) -> bool:
        """Make one recompute; return False if no recompute waits."""
        hold = secrets.token_hex(16)
        request = TakeRecompute(name=self._name, machine=self._machine, hold=hold)
        offer = await patiently(lambda: self._ask(checker_commands.take, request))
        task, self._trouble = offer.task, ""
        if task is None:
            return False
        outcome = await self._made(task, hold, stop)
        settled = await self._reported(task, hold, outcome)
        if isinstance(self._blobs, BlobFolder):
            self._blobs.tidy()
        result = CheckerResult(
            contribution=task.contribution,
            run=task.case.run.name,
            result=settled.result or GIVEN_BACK,
            message=settled.message or self._trouble,
            seconds=outcome.seconds,
        )
        self._results[result.result] += 1
        self._seconds += result.seconds
        self._tell(result)
        return True

    async def _reported(
        self, task: RecomputeTask, hold: str, outcome: CheckerOutcome
    ) -> CheckerVerdict:
        report = ReportRecompute(
            contribution=task.contribution, hold=hold, machine=self._machine, outcome=outcome
        )
        try:
            return await patiently(lambda: self._ask(checker_commands.report, report))
        except (Conflict, NotFound) as error:
            return CheckerVerdict(result="", message=error.message)

    async def _made(self, task: RecomputeTask, hold: str, stop: asyncio.Event) -> CheckerOutcome:
        """Return the outcome of a task; the task is given back if this checker stops or no longer
        holds it.
        """
        ended = Event()
        working = asyncio.ensure_future(self._redone(task, ended))
        watches = [asyncio.ensure_future(watch) for watch in (stop.wait(), self._lost(task, hold))]
        try:
            await asyncio.wait((working, *watches), return_when=asyncio.FIRST_COMPLETED)
            ended.set()
            return await working
        finally:
            ended.set()
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _redone(self, task: RecomputeTask, ended: Event) -> CheckerOutcome:
        def tell(step: int, steps: int) -> None:
            if ended.is_set():
                raise Unavailable("it was interrupted")
            contribution, run = task.contribution, task.case.run.name
            self._tell(CheckerStep(contribution=contribution, run=run, step=step, steps=steps))

        try:
            lacking = missing_library(task.case)  # a library of the workload's extra
            if lacking is not None:
                raise Unavailable(f"the library {lacking} is not installed here")
            files = await RecomputeFiles.of(task.case, task.given, self._blobs)
            data = await task.case.data(self._blobs)
        except (VolunteerError, OSError) as error:
            return self._given_back(error)
        work = redo, task.case, files, data, self._device, tell
        try:
            redone, seconds = await self._compute.timed(*work)
        except Unavailable as error:
            return self._given_back(error, failed=not ended.is_set())
        except Exception as error:  # probably a fault of the device
            return self._given_back(error)
        return CheckerOutcome(found=redone, seconds=seconds)

    async def _lost(self, task: RecomputeTask, hold: str) -> None:
        """Wait until another checker holds the recompute."""
        recompute = HeldRecompute(contribution=task.contribution, hold=hold)
        holding = True
        while holding:
            await asyncio.sleep(RENEW_S)
            with contextlib.suppress(VolunteerError):
                holding = (await self._ask(checker_commands.renew, recompute)).held

    def _given_back(self, error: Exception, *, failed: bool = True) -> CheckerOutcome:
        """Return the outcome of a task that ended with an error, and keep the error's sentence."""
        message = error.message if isinstance(error, VolunteerError) else why(error)
        self._trouble = message or type(error).__name__
        return CheckerOutcome(failed=failed)
