"""Failures ordered by name at named points.

Examples: `kill().after("write _commit")`, `fail(OSError()).before("put_file").twice()`. Points are
the seams between the house and the world:

    write <function>            a transaction that calls this store or service function
    put_file, put_bytes         a blob
    outbox put, outbox drop     a volunteer's finished result
    send <METHOD> <path part>   a request of a volunteer

`before` nothing has happened; `amid` the statements are done but not committed, or half of the body
is sent; `after` it is done and no other process knows. A fault that never fired fails the test.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from typing_extensions import override

from coordinator.database.engine.open_database import Database
from coordinator.storage.blobs import DiskBlobs
from volunteer.storage.outbox import Outbox, QueuedResult

When = Literal["before", "amid", "after"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One order. A fault without an error kills the process."""

    when: When = "before"
    point: str = ""
    nth: int = 1  # the first time that counts
    times: int = 1
    error: Exception | None = None

    def before(self, point: str) -> Fault:
        return replace(self, when="before", point=point)

    def amid(self, point: str) -> Fault:
        return replace(self, when="amid", point=point)

    def after(self, point: str) -> Fault:
        return replace(self, when="after", point=point)

    def on_the(self, nth: int) -> Fault:
        """Pass this often minus one, then fire."""
        return replace(self, nth=nth)

    def often(self, times: int) -> Fault:
        """Fire at so many times in a row."""
        return replace(self, times=times)

    def twice(self) -> Fault:
        return self.often(2)

    @override
    def __str__(self) -> str:
        """Return the form that another process parses."""
        return f"{self.when}|{self.point}|{self.nth}"

    @staticmethod
    def read(text: str) -> Fault:
        when, point, nth = text.split("|")
        return Fault(when=when, point=point, nth=int(nth))  # type: ignore[arg-type]


def kill() -> Fault:
    """Return a fault that kills the process, as by kill -9."""
    return Fault()


def fail(error: Exception) -> Fault:
    """Return a fault that raises an error."""
    return Fault(error=error)


@dataclass
class Faults:
    """Orders of a test, and how often each point was reached."""

    orders: tuple[Fault, ...]
    reached: dict[Fault, int] = field(default_factory=dict)
    fired: dict[Fault, int] = field(default_factory=dict)

    def reach(self, when: When, names: set[str]) -> None:
        """Act on the orders for a point with these names, which execution has reached."""
        for order in self.orders:
            if order.when != when or not any(_fits(order.point, name) for name in names):
                continue
            count = self.reached[order] = self.reached.get(order, 0) + 1
            if order.nth <= count < order.nth + order.times:
                self.fired[order] = self.fired.get(order, 0) + 1
                if order.error is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                else:
                    raise order.error

    @contextmanager
    def installed(self) -> Iterator[Faults]:
        """The seams of this process obey the orders inside; each must have fired in the end."""
        with pytest.MonkeyPatch.context() as patch:
            install(self, patch.setattr)
            yield self
        left = [f"{o} ({self.fired.get(o, 0)} of {o.times})" for o in self.orders if self._owes(o)]
        assert not left, f"these faults did not fire: {', '.join(left)}"

    def _owes(self, order: Fault) -> bool:
        return self.fired.get(order, 0) != order.times


def faults(*orders: Fault) -> Faults:
    return Faults(orders)


def _fits(point: str, name: str) -> bool:
    if point.startswith("send ") and name.startswith("send "):
        _, method, part = point.split(" ", 2)
        return name.startswith(f"send {method} ") and part in name
    return point == name


def install(faults: Faults, put: Callable[[Any, str, Any], None]) -> None:
    """Wrap the seams; `put` is setattr, or one that is undone later."""
    put(Database, "write", _write(faults, Database.write))
    for name in ("put_file", "put_bytes"):
        put(DiskBlobs, name, _blob(faults, name, getattr(DiskBlobs, name)))
    put(Outbox, "put", _outbox(faults, "put", Outbox.put))
    put(Outbox, "drop", _outbox(faults, "drop", Outbox.drop))
    transport = httpx.AsyncHTTPTransport
    put(transport, "handle_async_request", _send(faults, transport.handle_async_request))


def _called(work: Any) -> set[str]:
    """Return the names of a transaction: its function and the functions that it calls."""
    while isinstance(work, partial):
        work = work.func
    code = getattr(work, "__code__", None)
    names = {work.__name__, *(code.co_names if code is not None else ())}
    return {f"write {name}" for name in names}


def _write(faults: Faults, inner: Any) -> Any:
    async def write(self: Database, work: Callable[[Any], Any]) -> Any:
        names = _called(work)

        def until_commit(connection: Any) -> Any:
            result = work(connection)
            faults.reach("amid", names)
            return result

        faults.reach("before", names)
        result = await inner(self, until_commit)
        faults.reach("after", names)
        return result

    return write


def _blob(faults: Faults, name: str, inner: Any) -> Any:
    async def put(self: DiskBlobs, *given: str | bytes | Path) -> Any:
        faults.reach("before", {name})
        result = await inner(self, *given)
        faults.reach("after", {name})
        return result

    return put


def _outbox(faults: Faults, name: str, inner: Any) -> Any:
    def change(self: Outbox, entry: QueuedResult) -> None:
        faults.reach("before", {f"outbox {name}"})
        inner(self, entry)
        faults.reach("after", {f"outbox {name}"})

    return change


class _Halved(httpx.AsyncByteStream):
    """A body with a point in its middle."""

    def __init__(self, body: httpx.AsyncByteStream, reach: Callable[[], None]) -> None:
        self._body = body
        self._reach = reach

    @override
    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._body:
            yield piece[: len(piece) // 2]
            self._reach()
            yield piece[len(piece) // 2 :]


def _send(faults: Faults, inner: Any) -> Any:
    async def handle(self: Any, request: httpx.Request) -> httpx.Response:
        names = {f"send {request.method} {request.url.path}"}
        faults.reach("before", names)
        if isinstance(request.stream, httpx.AsyncByteStream):
            request.stream = _Halved(request.stream, lambda: faults.reach("amid", names))
        response: httpx.Response = await inner(self, request)
        faults.reach("after", names)
        return response

    return handle
