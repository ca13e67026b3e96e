"""Helper process outside of the sandbox for jobs that need the owner's session.

The sandbox cuts the program off from the desktop and the settings. The helper is forked before the
program is confined, does only jobs that it knows by name, and checks their JSON arguments. It also
answers the system calls that the sandbox refuses, and reports their names to the program.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec

from shared.decoding import MALFORMED, decode
from shared.errors import BadRequest, Unreachable, VolunteerError, error_of_code
from shared.sentences import Sentence, encode_english, encode_parts
from volunteer.control.commands import ReplyLine
from volunteer.machine import system_calls

BYTES_MAX = 1 << 20
BROWSER_S = 10.0

T = TypeVar("T")
Job = Callable[..., object]

_helper: socket.socket | None = None  # None: not confined, jobs run in this process
_refusals: socket.socket | None = None  # delivers a line for each system call that is refused
_JOB, _LISTENER = b".", b"r"  # kinds of messages to the helper: a job, or refused calls to report


def begin(jobs: Mapping[Job, Job]) -> None:
    """Start the helper for these jobs, each with the variant that checks its arguments."""
    global _helper
    near, far = socket.socketpair()
    if os.fork():
        far.close()
        _helper = near
        return
    os.setsid()  # protects the helper from signals of the terminal's keys
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    os.closerange(3, far.fileno())
    os.closerange(far.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    with suppress(BaseException):
        _serve(far, {job.__name__: handler for job, handler in jobs.items()})
    os._exit(0)


def do(job: Callable[..., T], *arguments: object) -> T:
    """Do a job outside of the sandbox and return its result. Raises the job's errors, and
    Unreachable if the helper has ended.
    """
    if _helper is None:
        return job(*arguments)
    near, far = socket.socketpair()
    try:
        with near:
            with far:
                socket.send_fds(_helper, [_JOB], [far.fileno()])
            near.sendall(msgspec.json.encode([job.__name__, arguments], enc_hook=str))
            near.shutdown(socket.SHUT_WR)
            reply = decode(_all(near), ReplyLine)
    except (OSError, *MALFORMED) as error:
        raise Unreachable(
            Sentence("the part of the program outside its sandbox has ended: start it again")
        ) from error
    if reply.code:
        raise error_of_code(reply.code, reply.message)
    return cast(T, decode(reply.value))


def report_refused_calls(listener: int) -> None:
    """Hand the listener of refused system calls to the helper, and close it in this process, which
    must not be able to allow calls.
    """
    global _refusals
    try:
        if _helper is not None:
            _refusals, far = socket.socketpair()
            with far:
                socket.send_fds(_helper, [_LISTENER], [listener, far.fileno()])
    finally:
        os.close(listener)  # without a reader the kernel answers that the call does not exist


async def refused_calls() -> AsyncIterator[str]:
    """Yield the name of each system call that the sandbox refuses, once."""
    if _refusals is None:
        return
    reader, writer = await asyncio.open_connection(sock=_refusals)
    try:
        while line := await reader.readline():
            yield line.decode().strip()
    finally:
        writer.close()


def _serve(requests: socket.socket, jobs: Mapping[str, Job]) -> None:
    """Serve requests until the confined process ends."""
    while True:
        data, handles, _, _ = socket.recv_fds(requests, 1, 2)
        if not data:
            return
        sockets = [socket.socket(fileno=handle) for handle in handles[-1:]]
        if data == _LISTENER:
            work = threading.Thread(target=_report, args=(handles[0], *sockets), daemon=True)
        else:
            work = threading.Thread(target=_answer, args=(*sockets, jobs), daemon=True)
        work.start()


def _report(listener: int, news: socket.socket) -> None:
    """Report refused system calls until the program ends."""
    try:
        with news:
            for name in system_calls.reports(listener):
                with suppress(OSError):  # the program does not read
                    news.sendall(f"{name}\n".encode())
    finally:
        os.close(listener)


def _answer(peer: socket.socket, jobs: Mapping[str, Job]) -> None:
    with peer, suppress(Exception):  # without an answer the other side raises an error
        try:
            name, arguments = decode(_all(peer), tuple[str, list[Any]])
            if name not in jobs:
                raise BadRequest(Sentence("nothing outside the sandbox does this"))
            value = msgspec.json.encode(jobs[name](*arguments), enc_hook=encode_english)
            reply = ReplyLine(id=0, value=msgspec.Raw(value))
        except VolunteerError as error:
            reply = ReplyLine(id=0, code=error.code, message=error.message)
        peer.sendall(msgspec.json.encode(reply, enc_hook=encode_parts))


def _all(peer: socket.socket) -> bytes:
    data = b""
    while len(data) <= BYTES_MAX and (piece := peer.recv(1 << 16)):
        data += piece
    return data


def open_page(page: str) -> bool:
    """Open a page in a browser, which must write outside of the sandbox; return True on success."""
    if not page.startswith(("http://", "https://")):
        return False
    try:
        done = subprocess.run(
            (sys.executable, "-P", "-m", "webbrowser", page),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=BROWSER_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
