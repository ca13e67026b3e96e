"""Work with PyTorch: in a child process of a server, or in a thread of a command.

Importing PyTorch would stop a server's event loop for seconds, its threads would take the cores
from the sockets, and a version too large for the memory would end the server. A child process
confines each of these to one computation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from threading import Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Protocol, TypeVar

import structlog

from shared.errors import Internal, Unavailable, VolunteerError
from shared.programs import gc_freeze
from shared.programs.machine_limits import threads
from shared.workloads.base import is_here

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

T = TypeVar("T")

# Reply of the child: (True, the result), or (False, (class of the error, its message)).
Reply = tuple[bool, object]
# Function that long work calls regularly; the work ends early when it returns True.
Stop = Callable[[], bool]
PAUSE_S = 0.05  # interval of checking whether a pause has ended
RESTART_S = 1.0  # shortest time before a dead child is started again
NICENESS = 5  # lower priority than the server, so that sockets go first
OOM_SCORE = "500"  # of 1000: the kernel ends this process before the server when memory is short

log = structlog.get_logger("compute")


class Flag(Protocol):
    """Byte in memory that a server shares with its child, without a lock that a dead child would
    keep.
    """

    value: int


def half_the_cores() -> int:
    """Return half the number of cores, at least one: the other half is for the threads that write,
    hash and sync files.
    """
    return max(1, threads() // 2)


class Compute:
    """Calls functions one after the other: in a child process if `separate`, else in a thread.

    The process starts with the first call, and after its death with the next one.
    """

    def __init__(self, name: str, *, torch_threads: int = 1, separate: bool = False) -> None:
        self.name = name
        self.busy_s = 0.0  # seconds of work since the server began
        self._torch_threads = max(1, torch_threads)
        self._separate = separate
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._stopping = False
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._died_at = -RESTART_S
        self._paused_s = 0.0
        self._paused: Flag = get_context("spawn").RawValue("b", 0)

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Return `work(stop, *arguments)`, computed in the child process or thread. Raises like
        `timed`.
        """
        return (await self.timed(work, *arguments))[0]

    @staticmethod
    def possible() -> bool:
        """Return True where PyTorch is installed; a server without it only answers requests."""
        return is_here("torch")

    async def timed(self, work: Callable[..., T], *arguments: object) -> tuple[T, float]:
        """Return the result of `run`, and the seconds of work without the wait for its turn and
        without pauses.

        Raises the errors of `work` (a child process turns all into a VolunteerError), Unavailable
        if that process dies or the server stops.
        """
        if not self.possible():
            raise Unavailable(
                "this server cannot compute, since PyTorch is not installed:"
                " run this on a server that has it"
            )
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._thread, self._timed, work, arguments)
        except RuntimeError as error:  # the executor was shut down
            raise Unavailable("the coordinator is stopping") from error
        try:
            return await future
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            # the server stops, and the work never began
            if self._stopping and caller is not None and not caller.cancelling():
                raise Unavailable("the coordinator is stopping") from None
            raise

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the running work at its next step; the time does not count as work."""
        began, self._paused.value = monotonic(), 1
        try:
            yield
        finally:
            self._paused.value = 0
            self._paused_s += monotonic() - began

    @property
    def stopping(self) -> bool:
        """Return True once `close` was called: running work has ended or will fail."""
        return self._stopping

    def close(self) -> None:
        """End the running work."""
        self._stopping = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()  # the thread that waits for its reply sees the pipe close

    # --- on the thread ---

    def _timed(self, work: Callable[..., T], arguments: tuple[object, ...]) -> tuple[T, float]:
        call = self._call_process if self._separate else self._call_thread
        before, began, paused = self.busy_s, monotonic(), self._paused_s
        try:
            result = call(work, arguments)
        finally:
            self.busy_s += monotonic() - began - (self._paused_s - paused)
        return result, self.busy_s - before

    def _call_thread(self, work: Callable[..., T], arguments: tuple[object, ...]) -> T:
        _limit_threads(self._torch_threads)
        return work(_stop(self._paused, lambda: self._stopping), *arguments)

    def _call_process(self, work: Callable[..., T], arguments: tuple[object, ...]) -> T:
        pipe = self._pipe or self._start()
        try:
            pipe.send((work, arguments))
            done, outcome = pipe.recv()
        except (EOFError, OSError) as error:
            raise self._after_death() from error
        if not done:
            kind, message = outcome
            raise kind(message)
        result: T = outcome
        return result

    def _start(self) -> Connection:
        sleep(max(0.0, self._died_at + RESTART_S - monotonic()))
        if self._stopping:
            raise Unavailable("the coordinator is stopping")
        spawning = get_context("spawn")
        near, far = spawning.Pipe()
        process = spawning.Process(
            target=_serve,
            args=(far, self._torch_threads, self._paused),
            name=self.name,
            daemon=True,
        )
        process.start()
        far.close()  # else a read from `near` would not end when the child dies
        self._process, self._pipe = process, near
        if self.stopping:  # the server stopped meanwhile
            process.kill()
        return near

    def _after_death(self) -> Unavailable:
        """Clean up after the process; return the error for the caller that waits for its reply."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        self._died_at = monotonic()
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.join()
            if not self._stopping:
                log.warning("process died", process=self.name, code=process.exitcode)
        return Unavailable(f"the process for {self.name} ended in the middle of its work")


def _limit_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def _stop(paused: Flag, ends: Stop) -> Stop:
    """Return the function that work calls at each step: it waits while `paused` is set, and returns
    True if the work must end.
    """

    def stop() -> bool:
        while paused.value and not ends():
            sleep(PAUSE_S)
        return ends()

    return stop


# --- in the child ---


def _serve(pipe: Connection, torch_threads: int, paused: Flag) -> None:
    """Answer calls until the server closes the pipe or dies."""
    yield_to_server(NICENESS, OOM_SCORE)
    Thread(target=_end_with_the_server, daemon=True).start()
    with gc_freeze.long_lived():
        _limit_threads(torch_threads)
    with contextlib.suppress(EOFError, OSError):
        while True:
            work, arguments = pipe.recv()
            pipe.send(_reply(work, (_stop(paused, lambda: False), *arguments)))


def yield_to_server(niceness: int, oom_score: str) -> None:
    """Lower the rank of this process below the server's: for processors by `niceness`, and for
    memory by `oom_score`, the score by which the kernel chooses the process to end first. Ctrl-C is
    left to the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this process ends
    with contextlib.suppress(OSError):
        os.nice(niceness)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(oom_score)


def _end_with_the_server() -> None:
    """End this process when the server dies, even in the middle of a computation."""
    server = parent_process()
    if server is not None:
        server.join()
        os._exit(1)


def _reply(work: Callable[..., object], arguments: tuple[object, ...]) -> Reply:
    try:
        return True, work(*arguments)
    except VolunteerError as error:
        return False, (type(error), error.message)
    except BaseException as error:
        return False, (Internal, f"{type(error).__name__}: {error}")
