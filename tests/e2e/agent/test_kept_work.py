"""What a volunteer gives finished work up for, and that nothing else makes it do so."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
from typing_extensions import override

from coordinator.intake import uploads
from shared.errors import BY_CODE, InvalidFrame
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator
from tests.support.local_volunteer import SHORT, LocalMachine, Process, local_machine
from tests.support.wayward_store import WaywardStore
from tests.unit.volunteer.net.test_reply_errors import FOREIGN
from volunteer.agent.submitter import REFUSALS
from volunteer.control import events
from volunteer.net import transfers

# A file that is whole here is sent again after "invalid_frame"; test_transfers has the damaged one.
CODES = [kind.code for kind in REFUSALS if kind is not InvalidFrame]


class Interrupter(httpx.AsyncBaseTransport):
    """Answers requests about results in place of the coordinator, while it has answers."""

    def __init__(self, inner: httpx.AsyncBaseTransport, answers: list[httpx.Response]) -> None:
        self.inner, self.answers = inner, answers

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.answers and re.search("/uploads|/submit", request.url.path):
            await request.aread()
            return self.answers.pop(0)
        return await self.inner.handle_async_request(request)


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[LocalMachine]:
    async with local_machine(tmp_path, SHORT) as made:
        yield made


async def ended(process: Process) -> events.TaskEnded | events.Judged:
    """Return how the first task ended: with a verdict, or without."""
    async with asyncio.timeout(120):
        while True:
            for event in process.told:
                if isinstance(event, events.TaskEnded | events.Judged):
                    return event
            await process.tick()


def foreign() -> list[httpx.Response]:
    statuses = (302, 400, 403, 404, 409, 410, 413, 422, 451, 500, 503)
    names = ("a page", "a gateway of our words", "an API", "nothing")
    return [
        httpx.Response(s, stream=httpx.ByteStream(FOREIGN[name]))
        for s in statuses
        for name in names
    ]


async def test_no_answer_of_something_in_between_costs_a_result(machine: LocalMachine) -> None:
    answers = foreign()
    async with machine.working(max_tasks=1) as process:
        process.network.inner = Interrupter(machine.home.transport, answers)
        event = await ended(process)
        assert isinstance(event, events.Judged), event
        assert event.verdict.state in ("accepted", "merged")
    assert answers == []


@pytest.mark.parametrize("code", CODES)
async def test_a_refusal_of_the_coordinator_ends_the_work(machine: LocalMachine, code: str) -> None:
    body = msgspec.json.encode({"code": code, "message": f"no: {code}", "request_id": "1c"})
    answers = [
        httpx.Response(BY_CODE[code].status, stream=httpx.ByteStream(body)) for _ in range(2)
    ]
    async with machine.working(max_tasks=1) as process:
        process.network.inner = Interrupter(machine.home.transport, answers)
        event = await ended(process)
        assert isinstance(event, events.TaskEnded), event
        assert event.how == {"gone": "gone", "cancelled": "cancelled"}.get(code, "refused")


@pytest.fixture
async def home(
    wayward: WaywardStore, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[LocalCoordinator]:
    monkeypatch.setenv("AWS_ENDPOINT_URL_PUBLIC", wayward.url)
    for module in (uploads, transfers):
        monkeypatch.setattr(module, "DIRECT_BYTES", 1)
    async with local_coordinator(tmp_path / "coordinator", blobs=s3_url) as made:
        yield made


@pytest.mark.parametrize("hidden", ["PUT .*/checked/", "(GET|HEAD) .*/checked/"])
async def test_a_store_that_does_not_find_an_upload_costs_no_result(
    home: LocalCoordinator, wayward: WaywardStore, tmp_path: Path, hidden: str
) -> None:
    await home.start_run(SHORT)
    machine = LocalMachine(tmp_path / "machine", home)
    await machine.join()
    wayward.absent, wayward.absences = re.compile(hidden), 4
    async with machine.working(max_tasks=1) as process:
        event = await ended(process)
        assert isinstance(event, events.Judged), event
        assert event.verdict.state in ("accepted", "merged")
    assert wayward.absences == 0


PARTS = RUN.replace('preset = "fedavg"\nquorum = 2', 'preset = "async-sgd"\ngradient_every = 2')
PARTS = PARTS.replace("local_steps = 2", "local_steps = 4")


class FirstPartRefuser(httpx.AsyncBaseTransport):
    """Answers the first part of a lease by an error that is no refusal, a few times; it notes the
    parts in the order of their arrival.
    """

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self.inner = inner
        self.errors = 2
        self.parts: list[tuple[int, int]] = []  # task and part of each submission

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread() if request.method == "POST" else b""
        if request.url.path.endswith("/uploads") and self.errors and json.loads(body)["part"] == 0:
            self.errors -= 1
            error = {"code": "not_found", "message": "no", "request_id": "1c"}
            return httpx.Response(404, stream=httpx.ByteStream(msgspec.json.encode(error)))
        if request.url.path.endswith("/submit"):
            task = int(request.url.path.split("/")[-2])
            self.parts.append((task, json.loads(body)["part"]))
        return await self.inner.handle_async_request(request)


async def test_no_part_is_sent_before_an_earlier_one_is_answered(tmp_path: Path) -> None:
    async with local_machine(tmp_path, PARTS) as machine, machine.working(max_tasks=1) as process:
        network = FirstPartRefuser(machine.home.transport)
        process.network.inner = network
        async with asyncio.timeout(120):
            while not any(part == 1 for _, part in network.parts):
                await process.tick()
    assert network.errors == 0
    assert [part for _, part in network.parts][:2] == [0, 1]
