"""Results on their way: which errors keep one, for how long, and what ends its lease."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
from msgspec.structs import replace

from coordinator.database import runs
from shared.errors import BY_CODE
from shared.protocol.accounts import Device
from shared.protocol.contributions import SubmitRequest
from tests.support.local_coordinator import RUN, LocalCoordinator
from tests.support.local_volunteer import CPU, SHORT, local_machine
from volunteer.account.profile import Profile
from volunteer.agent.lifecycle import FATAL
from volunteer.agent.submitter import REFUSALS
from volunteer.control import events
from volunteer.storage.outbox import Outbox

SYNC = RUN.replace('preset = "fedavg"', 'preset = "sync-sgd"')
# torch takes any index of its CPU: the second device is this processor once more
SECOND = Device(id="cpu:1", kind="cpu", name="another processor", memory_bytes=8 << 30)
NOT_YET = "could not be submitted yet"


def error(code: str) -> httpx.Response:
    """The coordinator's own answer."""
    body = msgspec.json.encode({"code": code, "message": "no", "request_id": "1c"})
    return httpx.Response(BY_CODE[code].status, stream=httpx.ByteStream(body))


class Submissions(httpx.AsyncBaseTransport):
    """The way to the coordinator, which notes submissions and may answer them itself."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport,
        answer: Callable[[int, SubmitRequest], httpx.Response | None],
    ) -> None:
        self._inner, self._answer = inner, answer
        self.seen: list[tuple[int, int, int]] = []  # task, part and tries of each

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            task = int(request.url.path.split("/")[-2])
            submission = msgspec.json.decode(await request.aread(), type=SubmitRequest)
            self.seen.append((task, submission.part, submission.tries))
            answer = self._answer(task, submission)
            if answer is not None:
                return answer
        return await self._inner.handle_async_request(request)


class Together(httpx.AsyncBaseTransport):
    """The way to the coordinator, on which tasks begin when two are claimed."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner, self._claims, self._both = inner, 0, asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/begin"):
            await self._both.wait()
        response = await self._inner.handle_async_request(request)
        self._claims += request.url.path.endswith("/claims")
        if self._claims == 2:
            self._both.set()
        return response


async def test_a_result_that_cannot_be_taken_now_keeps_no_other_waiting_for_long(
    tmp_path: Path,
) -> None:
    """It is kept without a word, tried for two minutes while others wait, and sent in the end."""
    async with local_machine(tmp_path, SHORT) as machine:
        machine.devices = (CPU, SECOND)
        async with machine.working(device="cpu, cpu:1", max_tasks=2) as process:
            process.network.inner = Together(machine.home.transport)
            process.network.refuse("/uploads")
            async with process.eventually():
                while len(process.all(events.Trained)) < 2:
                    await process.tick()
        full = list[int]()

        def answer(task: int, submission: SubmitRequest) -> httpx.Response | None:
            full.extend([task] if not full else [])
            both = {number for number, _, _ in way.seen} != {task}
            return error("unavailable") if task == full[0] and not both else None

        async with machine.working(max_tasks=1) as process:
            way = Submissions(machine.home.transport, answer)
            process.network.inner = way
            async with process.eventually():
                while len(process.all(events.Submitted)) < 2:
                    await process.tick()
            notices = [event.message for event in process.all(events.Notice)]
        first, second = dict.fromkeys(number for number, _, _ in way.seen)
        tries = [number for number, _, _ in way.seen].index(second)
        assert tries <= 12  # there are 25 in twenty minutes
        assert Counter(number for number, _, _ in way.seen)[second] == 1
        assert [text for text in notices if NOT_YET in str(text)] == []
        assert {event.task for event in process.all(events.Submitted)} == {first, second}


async def test_an_answer_that_is_no_refusal_costs_no_result(tmp_path: Path) -> None:
    """An upload that the server lost is made again at once, what nobody expects is told."""
    async with local_machine(tmp_path, SHORT) as machine:
        async with machine.working(max_tasks=1) as process:
            answers = [error("offset_mismatch"), error("not_found")]
            way = Submissions(
                machine.home.transport, lambda *_: answers.pop(0) if answers else None
            )
            process.network.inner = way
            judged = await process.until(events.Judged)
            assert await process.ended() == 0
        assert len(way.seen) == 3
        notices = [event.message for event in process.all(events.Notice)]
        assert len([text for text in notices if NOT_YET in str(text)]) == 1
        assert judged.verdict.state in ("accepted", "merged")
        assert process.all(events.TaskEnded) == []


def is_kept(code: str) -> bool:
    """Return True if an error of this code is no answer about a result, and ends no process."""
    kind = BY_CODE[code]
    return kind not in REFUSALS and not issubclass(kind, FATAL) and kind.status > 0


async def test_no_answer_but_a_refusal_drops_a_result(tmp_path: Path) -> None:
    """Not even one that is a kind of refusal elsewhere, as of a name or a code."""
    codes = sorted(code for code in BY_CODE if is_kept(code))
    assert {"invalid_code", "invalid_name", "invalid_run_file", "not_found"} <= {*codes}
    async with local_machine(tmp_path, SHORT) as machine:
        async with machine.working(max_tasks=1) as process:
            left = list(codes)
            way = Submissions(
                machine.home.transport, lambda *_: error(left.pop(0)) if left else None
            )
            process.network.inner = way
            judged = await process.until(events.Judged)
        assert len(way.seen) == len(codes) + 1
        assert judged.verdict.state in ("accepted", "merged")
        assert process.all(events.TaskEnded) == []


async def test_a_refused_result_takes_no_other_lease_of_its_task_along(tmp_path: Path) -> None:
    """The machine had the task twice, and only its first lease was given to somebody else."""
    async with local_machine(tmp_path, SHORT) as machine:
        async with machine.working(max_tasks=1) as process:
            process.network.refuse("/uploads")
            await process.until(events.Trained)
        profile = Profile(machine.directories.profile)
        identity = profile.current()
        assert identity is not None
        outbox = Outbox(profile.home(identity).outbox)
        (first,) = outbox.entries()
        second = replace(first, submit=replace(first.submit, attempt=2), at=first.at + 1)
        shutil.copy(outbox.payload(first.name), outbox.payload(second.name))
        outbox.put(second)
        async with machine.working(max_tasks=1) as process:
            way = Answers(machine.home.transport)
            process.network.inner = way
            async with process.eventually():
                while not {(1, "gone"), (2, "unavailable")} <= {*way.given}:
                    await asyncio.sleep(0.01)
                while outbox.payload(first.name).exists():
                    await asyncio.sleep(0.01)
        assert [entry.name for entry in Outbox(outbox.root).entries()] == [second.name]


class Answers(httpx.AsyncBaseTransport):
    """The way to a coordinator that gave the first attempt to somebody else, and rests."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.given: list[tuple[int, str]] = []  # attempts, and the errors about them

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if not path.endswith(("/uploads", "/submit")):
            return await self._inner.handle_async_request(request)
        attempt = int(msgspec.json.decode(await request.aread())["attempt"])
        code = "gone" if attempt == 1 else "unavailable"
        self.given.append((attempt, code))
        return error(code)


async def overtaken(home: LocalCoordinator) -> None:
    """Let two others make the next version."""
    for name in ("Bob", "Cleo"):
        worker = await home.join(name)
        lease = await worker.claim()
        assert (await worker.part(lease, await worker.begin(lease), 0)).state == "accepted"
    while (await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))).head < 1:
        await asyncio.sleep(0.01)


async def test_a_gradient_that_came_too_late_is_computed_again_within_its_lease(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path, SYNC) as machine:
        async with machine.working(max_tasks=1) as process:
            way = Submissions(machine.home.transport, lambda *_: None)
            process.network.inner = Overtaking(way, machine.home)
            async with process.eventually():
                while len(way.seen) < 2:
                    await process.tick()
        task = way.seen[0][0]
        assert way.seen[:2] == [(task, 0, 0), (task, 0, 1)]
        assert process.all(events.TaskEnded) == []


class Overtaking(httpx.AsyncBaseTransport):
    """The way to the coordinator, on which the first submission is overtaken by a merge."""

    def __init__(self, inner: httpx.AsyncBaseTransport, home: LocalCoordinator) -> None:
        self._inner, self._home, self._is_over = inner, home, False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit") and not self._is_over:
            self._is_over = True
            await overtaken(self._home)
        return await self._inner.handle_async_request(request)
