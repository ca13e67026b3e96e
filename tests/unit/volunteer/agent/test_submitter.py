"""Results on their way: which answers keep one, for how long, and what ends its lease."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
from typing_extensions import override

from coordinator.database import runs
from shared.clock import ServerClock
from shared.errors import BY_CODE
from shared.protocol.accounts import Me
from shared.protocol.contributions import (
    SubmitReply,
    SubmitRequest,
    UploadInfo,
    UploadRequest,
    Verdict,
)
from tests.support.local_coordinator import RUN, LocalCoordinator
from tests.support.local_volunteer import local_machine
from tests.support.virtual_clock import VirtualClock
from tests.unit.volunteer.agent.test_held_leases import held
from volunteer.account.profile_directory import Home, Identity
from volunteer.agent.held_leases import HeldLeases
from volunteer.agent.lifecycle import FATAL, Lifecycle
from volunteer.agent.submitter import EVENT_S, ONE_S, REFUSALS, UNEXPECTED_S, Submitter
from volunteer.agent.verdict_news import Verdicts
from volunteer.agent.workplace import RemoteCoordinator, Store, Timing, Workplace
from volunteer.control import events
from volunteer.control.event_bus import EventBus
from volunteer.control.events import AnyEvent
from volunteer.net.api import Api
from volunteer.net.client import Client
from volunteer.net.tls import Address
from volunteer.net.transfers import SEND_BYTES, Transfers
from volunteer.net.weights import Weights
from volunteer.storage.blob_cache import Cache
from volunteer.storage.leases import Leases
from volunteer.storage.outbox import Outbox, QueuedResult
from volunteer.storage.own_data import OwnData
from volunteer.storage.receipts import ReceiptBook

SYNC = RUN.replace('preset = "fedavg"', 'preset = "sync-sgd"')
IDENTITY = Identity(
    url="http://127.0.0.1:1", tls_pin="", public_key="", fingerprint="", server="",
    volunteer_id="v", worker_id="w", secret="s", nickname="Ann",
)  # fmt: skip
ME = Me(
    volunteer_id="v", nickname="Ann", public=True, state="active", earned_micro=7, pending_micro=0,
    spent_micro=0, today_micro=0, rank=None, accepted=1, rejected=0, merged=0, device_s=0.0,
    workers=(),
)  # fmt: skip
TURNS_MAX = 3000  # of the loop, until a test gives up
E = TypeVar("E")


def reply(value: object, status: int = 200) -> httpx.Response:
    headers = {"x-request-id": "1c"}
    body = httpx.ByteStream(msgspec.json.encode(value))
    return httpx.Response(status, headers=headers, stream=body)


def error(code: str) -> httpx.Response:
    """The coordinator's own answer."""
    return reply({"code": code, "message": "no", "request_id": "1c"}, BY_CODE[code].status)


class Desk(httpx.AsyncBaseTransport):
    """A coordinator's answers to uploads and submissions: those in `answers`, in turn, by the task
    and the attempt; then it takes what comes.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.uploads: list[UploadRequest] = []
        self.submitted: list[tuple[int, SubmitRequest]] = []  # and the task
        self.times: defaultdict[int, list[float]] = defaultdict(list)  # of submissions, by task
        self.upload_answers: dict[int, list[str]] = {}  # codes of errors
        self.answers: dict[tuple[int, int], list[str | dict[str, Any]]] = {}
        self.away: set[int] = set()  # tasks whose results cannot be taken now
        self.empty = True  # False: every upload still needs all its bytes
        self.piece_s = 0.0  # duration of a piece of an upload

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "PUT":
            assert isinstance(request.stream, httpx.AsyncByteStream)
            async for _ in request.stream:
                await self.clock.advance(self.piece_s)
            return reply(self._info(complete=True))
        if path.endswith("/uploads"):
            upload = msgspec.json.decode(await request.aread(), type=UploadRequest)
            self.uploads.append(upload)
            codes = self.upload_answers.get(upload.task, [])
            return error(codes.pop(0)) if codes else reply(self._info(complete=self.empty))
        task = int(path.split("/")[-2])
        submission = msgspec.json.decode(await request.aread(), type=SubmitRequest)
        self.submitted.append((task, submission))
        self.times[task].append(self.clock.now())
        if task in self.away:
            return error("unavailable")
        left = self.answers.get((task, submission.attempt), [])
        answer = left.pop(0) if left else {}
        return error(answer) if isinstance(answer, str) else reply(accepted(task, **answer))

    def _info(self, *, complete: bool) -> UploadInfo:
        size = self.uploads[-1].size
        offset = size if complete else 0
        return UploadInfo(
            upload_id="u", offset=offset, size=size, complete=complete, expires_at=0.0
        )

    @property
    def order(self) -> list[tuple[int, int, int]]:
        """Return task, part and tries of each submission."""
        return [(task, request.part, request.tries) for task, request in self.submitted]


def accepted(task: int, **changes: Any) -> SubmitReply:
    verdict = SubmitReply(contribution=100 + task, task=task, run="r", state="accepted")
    return msgspec.structs.replace(verdict, **changes)


class HeardBus(EventBus):
    """Keeps every event, those of progress too."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.events: list[AnyEvent] = []

    @override
    def emit(self, event: AnyEvent) -> None:
        self.events.append(event)
        super().emit(event)

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]


class Room:
    """A submitter with an outbox, and the desk that it submits to."""

    def __init__(self, path: Path, max_tasks: int = 0) -> None:
        self.clock = VirtualClock()
        self.desk = Desk(self.clock)
        self.bus = HeardBus(self.clock)
        self.life = Lifecycle(self.clock)
        self.held = HeldLeases(self.life, max_tasks)
        self.home = Home(path / "home")
        self.outbox = Outbox(self.home.outbox)
        cache, rng = Cache(path / "cache", 1 << 20), random.Random(1)
        address = IDENTITY.address
        assert address == Address(url="http://127.0.0.1:1")
        self.client = Client(address, clock=self.clock, rng=rng, transport=self.desk)
        api = Api(self.client)
        transfers = Transfers(api, cache)
        place = Workplace(
            remote=RemoteCoordinator(
                identity=IDENTITY,
                api=api,
                transfers=transfers,
                weights=Weights(transfers, cache, self.bus.notice),
            ),
            store=Store(
                home=self.home,
                cache=cache,
                outbox=self.outbox,
                leases=Leases(self.home.tasks),
                receipts=ReceiptBook(self.home.receipts),
                own_data=OwnData(self.home.own_data),
            ),
            bus=self.bus,
            life=self.life,
            held=self.held,
            timing=Timing(clock=self.clock, rng=rng),
            server_clock=ServerClock(self.clock),
        )
        self.verdicts = Verdicts(self.home, self.bus)
        self.submitter = Submitter(place=place, verdicts=self.verdicts)

    def put(
        self,
        task: int,
        *,
        attempt: int = 1,
        part: int = 0,
        last: bool = True,
        data: bytes = b"update",
        later: float = 0.0,
    ) -> QueuedResult:
        """Let a result wait, made `later` than the others of its lease."""
        submit = SubmitRequest(
            attempt=attempt, part=part, tries=part + 2, base_version=3, codec="float32",
            sha256=hashlib.sha256(data).hexdigest(), size=len(data), steps=4, samples=8,
            loss_first=2.0, loss_last=1.0,
        )  # fmt: skip
        entry = QueuedResult(
            task=task, run="r", device="cpu", submit=submit, price_micro=5,
            at=1000.0 * task + 10 * attempt + later, last=last,
        )  # fmt: skip
        self.outbox.payload(entry.name).write_bytes(data)
        self.outbox.put(entry)
        self.life.notify()
        return entry

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:  # an error of the submitter ends the test
            job = group.create_task(self.submitter.run())
            yield
            job.cancel()
        await self.client.close()

    async def until(self, holds: Callable[[], bool], step_s: float = 0.0) -> None:
        """Let time pass until something holds."""
        for _ in range(TURNS_MAX):
            if holds():
                return
            await self.clock.advance(step_s)
        raise AssertionError("nothing happens any more")

    async def emptied(self, step_s: float = 0.0) -> None:
        async with self.working():
            await self.until(lambda: len(self.outbox) == 0, step_s)

    def ends(self) -> list[tuple[int, str, str]]:
        return [(one.task, one.how, str(one.message)) for one in self.bus.all(events.TaskEnded)]

    def notices(self) -> list[tuple[str, str]]:
        return [(one.level, str(one.message)) for one in self.bus.all(events.Notice)]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


async def test_an_accepted_result_is_counted_told_and_gone(room: Room) -> None:
    entry = room.put(7)
    room.held.late.add((7, 1))
    expected = room.verdicts.expect(entry.name)
    news = Verdict(contribution=5, task=2, run="r", state="merged")
    room.desk.answers[7, 1] = [{"me": ME, "news": (news,)}]
    waiting = asyncio.ensure_future(room.life.until(lambda: room.outbox.entries() == ()))
    async with room.working():
        await room.until(waiting.done)
    assert (await expected).contribution == 107
    (upload,) = room.desk.uploads
    assert upload == UploadRequest(
        attempt=1, part=0, tries=2, sha256=entry.submit.sha256, size=6, task=7
    )
    assert room.desk.submitted == [(7, entry.submit)]
    (submitted,) = room.bus.all(events.Submitted)
    told = (submitted.task, submitted.contribution, submitted.bytes, submitted.last)
    assert told == (7, 107, 6, True)
    (credit,) = room.bus.all(events.Credits)
    assert credit.me == ME
    assert [judged.verdict.contribution for judged in room.bus.all(events.Judged)] == [107, 5]
    assert (room.home.memory.tasks, room.held.submitted, room.held.late) == (1, 1, set())
    assert room.ends() == []
    assert not room.outbox.payload(entry.name).exists()


async def test_parts_go_in_their_order_and_are_one_task(room: Room) -> None:
    """The outbox lists a later part first; the part of another attempt waits for none."""
    for part in range(3):
        room.put(7, part=part, last=part == 2, later=-part)
    room.put(7, attempt=2, part=1, last=False, later=-50)
    await room.emptied()
    order = [(request.attempt, request.part) for _, request in room.desk.submitted]
    assert [part for attempt, part in order if attempt == 1] == [0, 1, 2]
    assert order.index((2, 1)) < order.index((1, 1))
    assert [one.last for one in room.bus.all(events.Submitted)].count(True) == 1
    assert (room.home.memory.tasks, room.held.submitted) == (1, 1)


@pytest.mark.parametrize("last", [False, True])
async def test_a_part_that_came_too_late_ends_nothing(room: Room, last: bool) -> None:
    """It is computed again within its lease."""
    work = held(7)
    room.held.take(work)
    expected = room.verdicts.expect(room.put(7, last=last).name)
    room.desk.answers[7, 1] = [{"state": "rejected", "reason": "stale", "redo": True}]
    await room.emptied()
    assert (await expected).redo
    assert (work.ended, room.ends()) == ("", [])
    assert [one.last for one in room.bus.all(events.Submitted)] == [False]
    assert (room.home.memory.tasks, room.held.submitted) == (0, 0)


async def test_a_rejected_part_ends_the_work_on_its_lease(room: Room) -> None:
    work = held(7)
    room.held.take(work)
    expected = room.verdicts.expect(room.put(7, last=False).name)
    room.put(7, part=1, later=1.0)
    room.put(7, attempt=2)
    room.desk.answers[7, 1] = [{"state": "rejected", "message": "its norm\nis too large"}]
    await room.emptied()
    assert [(request.attempt, request.part) for _, request in room.desk.submitted] == [
        (1, 0),
        (2, 0),
    ]
    assert (work.ended, work.message) == ("gone", "its norm is too large")
    assert room.ends() == []  # told by the loop of its device
    assert (await expected).state == "rejected"


async def test_a_rejected_part_of_work_that_is_done_is_lost_and_makes_room(tmp_path: Path) -> None:
    room = Room(tmp_path, max_tasks=1)
    work = held(7)
    room.held.take(work)
    room.held.put_down(work, counted=True)
    room.put(7, last=False)
    room.put(7, part=1, later=1.0)
    room.desk.answers[7, 1] = [{"state": "rejected", "message": "its norm\nis too large"}]
    await room.emptied()
    assert room.desk.order == [(7, 0, 2)]
    assert room.ends() == [(7, "gone", "its norm is too large")]
    assert not room.held.exhausted


@pytest.mark.parametrize("state", ["rejected", "accepted"])
async def test_the_verdict_on_the_last_result_is_the_end_of_its_task(
    room: Room, state: str
) -> None:
    for task in (7, 8):
        room.put(task)
        room.desk.answers[task, 1] = [{"state": state}]
    await room.emptied()
    assert (room.home.memory.tasks, room.held.submitted, room.ends()) == (2, 2, [])


async def test_a_rejected_part_whose_lease_is_not_all_here_is_no_end(room: Room) -> None:
    """An earlier process made it, and the rest was never computed."""
    room.put(7, last=False)
    room.desk.answers[7, 1] = [{"state": "rejected"}]
    await room.emptied()
    assert room.ends() == []


HOW = {"gone": "gone", "cancelled": "cancelled"}


@pytest.mark.parametrize("code", sorted(kind.code for kind in REFUSALS))
async def test_a_refused_result_is_lost_and_its_lease_with_it(tmp_path: Path, code: str) -> None:
    """But no other lease of its task, which the machine had twice."""
    room = Room(tmp_path, max_tasks=1)
    work = held(7)
    room.held.take(work)
    room.held.put_down(work, counted=True)
    room.held.late.add((7, 1))
    expected = room.verdicts.expect(room.put(7, last=False).name)
    room.put(7, part=1, later=1.0)
    room.put(7, attempt=2)
    room.desk.answers[7, 1] = [code]
    await room.emptied()
    assert [(request.attempt, request.part) for _, request in room.desk.submitted] == [
        (1, 0),
        (2, 0),
    ]
    ((task, how, message),) = room.ends()
    assert (task, how) == (7, HOW.get(code, "refused"))
    assert "no" in message
    assert (room.held.exhausted, room.held.late) == (False, set())
    assert room.home.memory.tasks == 1  # of the other lease
    with pytest.raises(BY_CODE[code]):
        await expected


@pytest.mark.parametrize("left", [None, b"upd"], ids=["deleted", "cut off"])
async def test_a_result_whose_file_is_gone_is_told_and_keeps_no_other_waiting(
    room: Room, left: bytes | None
) -> None:
    room.desk.empty = False  # every byte is wanted
    path = room.outbox.payload(room.put(7).name)
    room.put(8)
    if left is None:
        path.unlink()
    else:
        path.write_bytes(left)
    await room.emptied(1.0)
    assert [task for task, _ in room.desk.submitted] == [8]
    ((task, how, message),) = room.ends()
    assert (task, how) == (7, "refused")
    assert message == f"{path} is missing or damaged"


@pytest.mark.parametrize("code", ["gone", "cancelled", "conflict"])
async def test_a_refusal_ends_the_work_on_its_lease(room: Room, code: str) -> None:
    work = held(7)
    room.held.take(work)
    room.put(7, last=False)
    room.desk.answers[7, 1] = [code]
    await room.emptied()
    assert work.ended == ("cancelled" if code == "cancelled" else "gone")
    assert work.message
    assert room.ends() == []


async def test_an_upload_that_nobody_wants_any_more_may_have_been_submitted(room: Room) -> None:
    """The reply to an earlier submission may be lost."""
    room.put(7)
    room.desk.upload_answers[7] = ["gone"]
    await room.emptied()
    assert room.ends() == []
    assert [one.last for one in room.bus.all(events.Submitted)] == [True]


async def test_an_upload_that_the_server_lost_is_made_again_at_once(room: Room) -> None:
    room.put(7)
    room.desk.answers[7, 1] = ["offset_mismatch"]
    began = room.clock.now()
    await room.emptied(0.25)
    assert len(room.desk.uploads) == len(room.desk.submitted) == 2
    assert room.clock.now() - began < 5.0
    assert (room.ends(), room.notices()) == ([], [])


def is_kept(code: str) -> bool:
    """Return True if an error of this code is no answer about a result, and ends no process."""
    kind = BY_CODE[code]
    return kind not in REFUSALS and not issubclass(kind, FATAL) and kind.status > 0


async def test_no_answer_but_a_refusal_drops_a_result(room: Room) -> None:
    """Not even one that is a kind of refusal elsewhere, as of a name or a code. The owner hears of
    answers that nobody expects, which are not repeated at once.
    """
    codes = sorted(code for code in BY_CODE if is_kept(code))
    assert {"invalid_code", "invalid_name", "invalid_run_file", "not_found"} <= {*codes}
    room.put(7)
    room.desk.answers[7, 1] = [*codes]
    await room.emptied(UNEXPECTED_S / 4)
    assert len(room.desk.submitted) == len(codes) + 1
    assert room.ends() == []
    assert len(room.bus.all(events.Submitted)) == 1
    said = room.notices()
    assert {level for level, _ in said} == {"warning"}
    assert all(text.startswith("task 7 could not be submitted yet: no") for _, text in said)
    odd = codes.index("not_found")
    times = room.desk.times[7]
    assert UNEXPECTED_S <= times[odd + 1] - times[odd] < 2 * UNEXPECTED_S


@pytest.mark.parametrize("code", ["unauthorized", "banned", "upgrade_required"])
async def test_who_may_not_go_on_keeps_the_result(room: Room, code: str) -> None:
    room.put(7)
    room.desk.answers[7, 1] = [code] * 9
    async with room.working():
        await room.until(lambda: room.life.fatal is not None)
        await room.clock.advance(UNEXPECTED_S - 1)
        assert len(room.desk.submitted) == 1
    assert isinstance(room.life.fatal, BY_CODE[code])
    assert (len(room.outbox), room.ends(), room.notices()) == (1, [], [])


@pytest.mark.parametrize("code", ["unavailable", "not_found"])
@pytest.mark.parametrize("before", [False, True])
async def test_a_result_that_cannot_be_taken_now_keeps_no_other_waiting(
    room: Room, code: str, before: bool
) -> None:
    """Whether the other one waited before, or comes while the first is tried again."""
    room.desk.answers[1, 1] = [code] * 60
    room.put(1)
    if before:
        room.put(2)
    async with room.working():
        await room.until(lambda: len(room.desk.times[1]) > 0, 0.1)
        if not before:
            await room.clock.advance(5 * ONE_S)
            room.put(2)
        arrived = room.clock.now()
        await room.until(lambda: 2 in room.desk.times, 0.1)
        assert room.desk.times[2][0] - arrived < 1.0
        await room.until(lambda: len(room.outbox) == 1)
        failed = len(room.desk.times[1])
        for _ in range(8):
            await room.clock.advance(ONE_S)
        assert failed < len(room.desk.times[1]) < 60  # less and less often
        room.desk.answers[1, 1] = []
        await room.until(lambda: len(room.outbox) == 0, 1.0)
    assert room.ends() == []
    assert len(room.bus.all(events.Submitted)) == 2


async def test_no_result_is_tried_without_pause_while_the_server_takes_none(room: Room) -> None:
    room.desk.away = {1, 2, 3}
    for task in (1, 2, 3):
        room.put(task)
    async with room.working():
        await room.clock.advance(1.0)
        for _ in range(20 * 60):
            await room.clock.advance(1.0)
        tries = [len(room.desk.times[task]) for task in (1, 2, 3)]
        assert sum(tries) < 20 * 60 / 10
        assert min(tries) > 10
        room.desk.away = set()
        await room.until(lambda: len(room.outbox) == 0, 1.0)
    assert (room.ends(), room.notices()) == ([], [])


async def test_the_progress_of_an_upload_is_told_now_and_then_and_at_its_end(room: Room) -> None:
    size = 7 * SEND_BYTES - 1
    room.desk.empty, room.desk.piece_s = False, EVENT_S / 2
    room.put(7, data=bytes(size))
    await room.emptied()
    seen = [(one.task, one.done_bytes, one.total_bytes) for one in room.bus.all(events.Uploading)]
    done = [0, *(piece * SEND_BYTES for piece in (2, 4, 6)), size]
    assert seen == [(7, number, size) for number in done]


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
            way = Overtaking(machine.home.transport, machine.home)
            process.network.inner = way
            async with process.eventually():
                while len(way.submitted) < 2:
                    await process.tick()
        task = way.submitted[0][0]
        assert way.submitted[:2] == [(task, 0, 0), (task, 0, 1)]
        assert process.all(events.TaskEnded) == []


class Overtaking(httpx.AsyncBaseTransport):
    """The way to the coordinator, on which the first submission is overtaken by a merge."""

    def __init__(self, inner: httpx.AsyncBaseTransport, home: LocalCoordinator) -> None:
        self._inner, self._home = inner, home
        self.submitted: list[tuple[int, int, int]] = []  # task, part and tries of each

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            task = int(request.url.path.split("/")[-2])
            submission = msgspec.json.decode(await request.aread(), type=SubmitRequest)
            self.submitted.append((task, submission.part, submission.tries))
            if len(self.submitted) == 1:
                await overtaken(self._home)
        return await self._inner.handle_async_request(request)
