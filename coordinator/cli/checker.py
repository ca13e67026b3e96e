"""Command `coordinator checker`: recomputes volunteers' tasks on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from coordinator.cli.listing import as_json_line
from coordinator.cli.target import HERE, TargetOptions, Where, reached
from shared.programs.silence_watch import end_watch

if TYPE_CHECKING:
    from coordinator.admin.checker_machine import CheckerResult, CheckerStep, CheckerSummary

THREADS_MAX = 1024
TIMEOUT_S = 120.0  # time for one answer of a server

app = App(name="checker", help="Recompute drawn tasks of volunteers on this machine.")


@app.command
def work(
    *,
    device: Annotated[
        str, Parameter(help="Where to compute: cpu, cuda, cuda:1, mps; auto takes the fastest.")
    ] = "auto",
    threads: Annotated[int, Parameter(help="Threads of PyTorch; 0 = one a core.")] = 0,
    once: Annotated[
        bool, Parameter(help="Exit when no task waits for this device.", negative="")
    ] = False,
    where: TargetOptions = HERE,
) -> int:
    """Recompute tasks of volunteers that were drawn for a check, on this machine, until a stop
    signal.

    Tasks from devices of this machine's class come first, since the server's processor cannot
    compare them. Exit code 1 if a recompute failed, which suspends the account.
    """
    import asyncio

    from shared.errors import BadRequest
    from shared.programs.machine_limits import threads as usable

    if threads < 0 or threads > THREADS_MAX:
        raise BadRequest(f"--threads must lie between 0 and {THREADS_MAX}")
    screen = _Lines(json=where.json)
    done = asyncio.run(_work(where, device, threads or usable(), once, screen))
    screen.end(done)
    return 1 if done.results["failed"] else 0


async def _work(
    where: Where, device: str, threads: int, once: bool, screen: _Lines
) -> CheckerSummary:
    import asyncio
    import signal
    import socket
    import tempfile
    from pathlib import Path

    from coordinator.admin.checker_machine import BlobFolder, Checker
    from coordinator.admin.remote_server import RemoteServer
    from coordinator.checking.recompute_comparison import machine_of
    from coordinator.compute import Compute
    from coordinator.log import configure

    configure("warning", as_json=False)
    place, machine = await asyncio.to_thread(machine_of, device)
    name = f"{socket.gethostname()}/{place}"[:128]
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ended() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # a second signal ends the process at once

    compute = Compute("checker", torch_threads=threads)
    with tempfile.TemporaryDirectory(prefix="checker-") as folder:
        async with reached(where, TIMEOUT_S, "directory") as (ask, there):
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, ended)
            blobs = (
                BlobFolder(there, Path(folder)) if isinstance(there, RemoteServer) else there.blobs
            )
            checker = Checker(ask, blobs, compute, (name, place, machine), screen.tell)
            screen.begin(name, machine.model, threads)
            end_watch()
            try:
                await checker.run(stop, once=once)
            finally:
                compute.close()
            return checker.summary


class _Lines:
    """Lines about a checker's work: one for each recompute, and on a terminal its progress."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._moves = not json and sys.stderr.isatty()

    def begin(self, name: str, model: str, threads: int) -> None:
        if not self._json:
            on = f" ({model})" if model else f", {threads} threads"
            print(f"Checks as {name}{on}. Ctrl+C ends it and gives back what is under way.")

    def tell(self, news: CheckerStep | CheckerResult) -> None:
        from coordinator.admin.checker_machine import CheckerResult

        if isinstance(news, CheckerResult):
            self._found(news)
        elif self._moves:
            progress = (
                f"{news.run}, contribution {news.contribution}: step {news.step}/{news.steps}"
            )
            print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)

    def _found(self, result: CheckerResult) -> None:
        if self._json:
            as_json_line(result)
            return
        if self._moves:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        message = f" ({result.message})" if result.message else ""
        print(
            f"{result.run}, contribution {result.contribution}: {result.result}{message}, "
            f"{result.seconds:.1f} s",
            flush=True,
        )

    def end(self, done: CheckerSummary) -> None:
        if self._json:
            as_json_line(done)
            return
        counts = ", ".join(f"{count} {name}" for name, count in done.results.items() if count)
        print(f"{counts or 'nothing done again'}, {done.seconds:,.1f} s")


def add_to(parent: App) -> None:
    parent.command(app)
