"""Processes that start in milliseconds: one that has imported everything forks itself on request.

Run as a script this file is that process: one JSON request a line on stdin, a socket that may bring
two pipes with it, one JSON line on stdout for each start and each end of a child. When its stdin
ends, so do its children.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
PDEATHSIG = 1
BIRTH_S = 120.0  # the first one waits for the imports
MODULES = [
    "alembic.command",
    "alembic.config",
    "anyio.to_thread",
    "asyncpg",
    "coordinator.http.app",
    "coordinator.cli.main",
    "coordinator.http.openapi",
    "coordinator.http.routes.handlers",
    "coordinator.http.server",
    "coordinator.pages.app",
    "coordinator.v1.app",
    "coordinator.database.migrations.triggers",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cryptography.hazmat.primitives.serialization",
    "encodings.ascii",
    "encodings.idna",
    "httptools",
    "multiprocessing.popen_forkserver",
    "multiprocessing.sharedctypes",
    "numpy.random",
    "platformdirs",
    "shared.workloads.gpt.workload",
    "shared.workloads.gpt.evaluate",
    "shared.workloads.gpt.train",
    "shared.workloads.data.text_dataset",
    "shared.workloads.games",
    "sqlalchemy.dialects.postgresql.asyncpg",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "starlette.applications",
    "starlette.concurrency",
    "starlette.middleware",
    "starlette.responses",
    "starlette.routing",
    "tests.support.failpoints",
    "tokenizers",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
    "volunteer.__main__",
    "volunteer.cli.main",
    "volunteer.engine",
    "volunteer.headless",
    "volunteer.cli.start",
]


# of the processes of a server that compute, which fork from one that has imported PyTorch
COMPUTING = [
    "tests.support.patient_forkserver",
    "torch",
    "coordinator.compute",
    "coordinator.merging.evaluation",
    "shared.workloads.gpt.workload",
    "shared.workloads.gpt.evaluate",
    "shared.workloads.gpt.train",
]


@dataclass
class Child:
    """A process of the nursery."""

    pid: int
    log: Path
    death: Future[int] = field(default_factory=Future)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless it is dead."""
        if not self.death.done():
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    @property
    def alive(self) -> bool:
        return not self.death.done()

    async def ended(self, timeout_s: float = 30.0) -> int:
        """The exit code; minus the number of the signal that killed it."""
        return await asyncio.wait_for(
            asyncio.shield(asyncio.wrap_future(self.death)), timeout=timeout_s
        )

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class Piped:
    """A process of the nursery as `subprocess.Popen` gives one, its output in two pipes."""

    def __init__(self, child: Child, stdout: IO[str], stderr: IO[str]) -> None:
        self._child = child
        self.pid = child.pid
        self.stdout: IO[str] | None = stdout
        self.stderr: IO[str] | None = stderr

    def __enter__(self) -> Piped:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for its end; kill it if the test failed meanwhile, or it would wait for ever."""
        if kind is not None:
            self.kill()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; what it wrote. Beside its errors waits at most a pipe of output."""
        assert self.stdout is not None
        assert self.stderr is not None
        errors = self.stderr.read()
        return self.stdout.read(), errors

    def poll(self) -> int | None:
        return None if self._child.alive else self._child.death.result()

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self._child.death.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        self._child.kill(number)

    def terminate(self) -> None:
        self._child.kill(signal.SIGTERM)

    def kill(self) -> None:
        self._child.kill()


class ForkServer:
    """Client of the fork server's process, which imports `modules` too."""

    def __init__(self, *modules: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), *modules],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                cwd=ROOT,
                env=environment,
            )
        self._births: list[tuple[Path, Future[Child]]] = []
        self._children: dict[int, Child] = {}
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "born" in said:
                log, birth = self._births.pop(0)
                self._children[said["born"]] = child = Child(said["born"], log)
                if birth.set_running_or_notify_cancel():  # its test may have ended meanwhile
                    birth.set_result(child)
            else:
                self._children.pop(said["died"]).death.set_result(said["code"])

    async def serve(
        self, settings: Mapping[str, Any], log: Path, faults: Sequence[object] = ()
    ) -> Child:
        """`coordinator serve` with these settings."""
        orders = [str(fault) for fault in faults]
        return await self._bear({"serve": dict(settings), "log": str(log), "faults": orders})

    async def run(
        self,
        argv: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        faults: Sequence[object] = (),
    ) -> Child:
        """A command line, "coordinator" or "volunteer" first."""
        orders = [str(fault) for fault in faults]
        request = {"argv": list(argv), "environment": dict(environment or {})}
        return await self._bear(request | {"log": str(log), "faults": orders})

    def piped(
        self, argv: Sequence[str], environment: Mapping[str, str], folder: Path = ROOT
    ) -> Piped:
        """A command line, "coordinator" or "volunteer" first, in a folder, with this environment
        alone.
        """
        out, err = os.pipe(), os.pipe()
        with open(out[1], "wb") as one, open(err[1], "wb") as other:
            child = self._into((one, other), argv, environment, folder)
        return Piped(child, open(out[0]), open(err[0]))

    def unheard(self, argv: Sequence[str], environment: Mapping[str, str]) -> Child:
        """The same, whose output goes nowhere."""
        with open(os.devnull, "wb") as nowhere:
            return self._into((nowhere, nowhere), argv, environment, ROOT)

    def _into(
        self,
        files: tuple[IO[bytes], IO[bytes]],
        argv: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
    ) -> Child:
        request: dict[str, Any] = {"argv": list(argv), "environment": dict(environment)}
        request |= {"folder": str(folder), "faults": [], "pipes": True, "log": os.devnull}
        return self._order(request, *(file.fileno() for file in files)).result(BIRTH_S)

    async def _bear(self, request: dict[str, Any]) -> Child:
        return await asyncio.wait_for(asyncio.wrap_future(self._order(request)), BIRTH_S)

    def _order(self, request: dict[str, Any], *files: int) -> Future[Child]:
        birth: Future[Child] = Future()
        self._births.append((Path(request["log"]), birth))
        line = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._line, [line], files) if files else 0
        self._line.sendall(line[sent:])
        return birth

    def close(self) -> None:
        assert self._process.stdout is not None
        self._line.close()
        self._process.wait(30)
        self._listener.join(30)
        self._process.stdout.close()


# --- the other process ---


def _become(request: dict[str, Any], files: Sequence[int]) -> NoReturn:
    """Run the request in the new child and end."""
    from tests.support.failpoints import Fault, Faults, install

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if "pipes" in request:
        os.chdir(request["folder"])
        os.environ.clear()
        out, err = files
    else:
        out = err = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for file in files:
        os.close(file)
    code = 70
    try:
        install(Faults(tuple(Fault.read(text) for text in request["faults"])), setattr)
        code = _serve(request["serve"]) if "serve" in request else _run(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(settings: dict[str, Any]) -> int:
    from coordinator.config import Settings
    from coordinator.http.server import serve
    from shared.decoding import convert

    return serve(convert(settings, Settings))


def _run(request: dict[str, Any]) -> int:
    os.environ.update(request["environment"])
    time.tzset()
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    sys.argv = request["argv"]
    if sys.argv[0] == "coordinator":
        from coordinator.cli.main import main

        main()
    else:
        from volunteer.__main__ import main as volunteer

        volunteer()
    return 0


def _tell(**news: int) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def _prepare(modules: Sequence[str]) -> None:
    """Import the modules of the children, build their wheel, and exclude all of it from garbage
    collection; nothing here may start a thread.
    """
    gc.disable()
    for name in (*MODULES, *modules):
        importlib.import_module(name)
    _prepare_wheel()
    _prepare_computing()
    gc.freeze()
    gc.enable()


def _prepare_wheel() -> None:
    """Build the wheel that every server describes, which takes 0.35 s of CPU time in each."""
    from shared.errors import Configuration
    from shared.programs.wheel import own_wheel

    with suppress(Configuration):  # a tree that was never installed has none
        own_wheel()


def _prepare_computing() -> None:
    """Let servers fork the processes that compute in place of importing PyTorch in each."""
    from coordinator import compute

    multiprocessing.set_forkserver_preload(COMPUTING)
    forkserver.ensure_running()
    # a server is not its parent, and would not find it among its children
    vars(forkserver._forkserver)["ensure_running"] = lambda: None
    vars(compute)["get_context"] = lambda kind: multiprocessing.get_context("forkserver")


def _main() -> None:
    _prepare(sys.argv[1:])
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which closes the line
    children: set[int] = set()
    waiting = b""
    files: list[int] = []
    line = socket.socket(fileno=0)
    while True:
        ready, _, _ = select.select([0, reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            while children and (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in children:  # the other child is the fork server of multiprocessing
                    children.discard(found[0])
                    _tell(died=found[0], code=os.waitstatus_to_exitcode(found[1]))
        if 0 in ready:
            came, new, _, _ = socket.recv_fds(line, 1 << 16, 2)
            if not came:
                break
            files += new
            *requests, waiting = (waiting + came).split(b"\n")
            for request in map(json.loads, requests):
                its, files = (files[:2], files[2:]) if "pipes" in request else ([], files)
                pid = os.fork()
                if not pid:
                    _become(request, its)
                for file in its:
                    os.close(file)
                children.add(pid)
                _tell(born=pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    _main()
