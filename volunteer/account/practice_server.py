"""A coordinator of one's own, to try everything without a link: private, on this machine, its
credits worth nothing.

It is the same program that organisers run, as a process of its own that ends with the volunteer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.errors import Configuration, Unavailable
from shared.sentences import Sentence
from volunteer.control.status import PRACTICE
from volunteer.files import private_directory, read_record, set_aside, write_record

RUN = "stdlib-gpt"  # what `coordinator run create --example` makes
START_S, END_S = 60.0, 10.0
PREPARE_S = 300.0
PROBE_S = 0.1
SAID_CHARS_MAX = 300


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Stored state of the practice coordinator."""

    port: int = 0
    prepared: bool = False


class Practice:
    """Runs a practice coordinator on this machine; `root` is its directory in the profile."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._child: asyncio.subprocess.Process | None = None

    @property
    def exists(self) -> bool:
        return (self._root / "practice.json").exists()

    def owns(self, url: str) -> bool:
        """Return True if a coordinator's address is that of the practice coordinator."""
        return self.exists and url == _url(self._read().port)

    async def start(self) -> str:
        """Its address, once it listens. Raises Unavailable with what it said."""
        record = self._read()
        if record.port and await _listens(record.port):
            return _url(record.port)  # of an earlier start that did not end
        data = private_directory(self._root / "coordinator")
        if not record.prepared:
            await self._call("run", "create", "--example", "--data-dir", str(data))
            await self._call("run", "start", RUN, "--data-dir", str(data))
        port = record.port if record.port and _free(record.port) else _free_port()
        write_record(self._root / "practice.json", Record(port=port, prepared=True), durable=True)
        await self._serve(data, port)
        return _url(port)

    async def stop(self) -> None:
        """End it, in good order if it does not take long."""
        child, self._child = self._child, None
        if child is None or child.returncode is not None:
            return
        child.terminate()
        try:
            await asyncio.wait_for(child.wait(), END_S)
        except TimeoutError:
            child.kill()
            await child.wait()

    def _read(self) -> Record:
        path = self._root / "practice.json"
        try:
            return read_record(path, Record) or Record()
        except Configuration:
            set_aside(path)
            return Record()

    async def _call(self, *arguments: str) -> None:
        """Run one command of the organiser."""
        child = await self._spawn(arguments, asyncio.subprocess.PIPE)
        try:
            _, said = await asyncio.wait_for(child.communicate(), PREPARE_S)
        except TimeoutError as error:
            child.kill()
            raise Unavailable(Sentence("preparing the practice run took too long")) from error
        if child.returncode != 0 and b"already" not in said:
            raise Unavailable(
                Sentence("the practice run could not be prepared: {said}", said=_last(said))
            )

    async def _serve(self, data: Path, port: int) -> None:
        log = self._root / "coordinator.log"
        with log.open("wb") as out:
            arguments = ("serve", "--data-dir", str(data), "--port", str(port), "--name", PRACTICE)
            child = self._child = await self._spawn(arguments, out.fileno())
        until = time.monotonic() + START_S
        while not await _listens(port):
            if child.returncode is not None or time.monotonic() > until:
                await self.stop()
                raise Unavailable(
                    Sentence(
                        "the practice coordinator did not start: {said}",
                        said=_last(log.read_bytes()),
                    )
                )
            await asyncio.sleep(PROBE_S)

    async def _spawn(self, arguments: Sequence[str], errors: int) -> asyncio.subprocess.Process:
        script = Path(sys.executable).with_name("coordinator")
        command = (
            [str(script)]
            if script.exists()
            else [sys.executable, "-c", "from coordinator.cli.main import main; main()"]
        )
        private_directory(self._root)
        return await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # ctrl+c is for the volunteer, which ends it in order
        )


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _last(said: bytes) -> str:
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:SAID_CHARS_MAX] if lines else Sentence("it said nothing")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
