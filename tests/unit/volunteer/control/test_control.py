"""Control: commands in, events out, the same in this process and over the local socket."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from shared.errors import BadRequest, Configuration, Unreachable
from shared.protocol import endpoints
from shared.protocol.contributions import Verdict
from shared.protocol.heartbeat import RunBeat
from shared.protocol.listings import LossPoint
from tests.support.virtual_clock import VirtualClock
from tests.tui.engine import FakeEngine
from tests.tui.scenes import RUN
from volunteer.control import commands, events
from volunteer.control.commands import AnyCommand, Command, Query, StatusSnapshot
from volunteer.control.control import Control
from volunteer.control.event_bus import PENDING_MAX, EventBus, Subscription
from volunteer.control.local_socket import ControlServer, SocketAddress, attach
from volunteer.control.status import Status, fold
from volunteer.files import write_record


def training(task: int = 1, step: int = 1) -> events.Training:
    return events.Training(
        task=task,
        run="r",
        device="cpu",
        step=step,
        steps=10,
        samples=step,
        loss=2.0,
        steps_per_s=1.0,
        tokens_per_s=64.0,
        eta_s=5.0,
        version=3,
    )


def claimed(task: int = 1, device: str = "cpu") -> events.Claimed:
    return events.Claimed(
        task=task,
        attempt=1,
        run="r",
        workload="gpt",
        device=device,
        steps=10,
        samples=80,
        price_micro=5,
        finish_by=100.0,
    )


def judged(task: int, state: Any) -> events.Judged:
    return events.Judged(verdict=Verdict(contribution=task, task=task, run="r", state=state))


async def drain(subscription: Subscription) -> list[Any]:
    subscription.close()
    return [event async for event in subscription]


# The status is what the events say.


def told(*seen: Any) -> Status:
    status = Status()
    for event in seen:
        status = fold(status, event)
    return status


def test_results_that_were_handed_in_do_not_wait_any_more() -> None:
    status = told(events.Connection(online=False, message="it is away", queued=2))
    assert status.queued == 2
    status = fold(status, events.Connection(online=True, queued=2))
    for left in (1, 0, 0):
        status = fold(status, events.Submitted(task=1, contribution=1, bytes=9))
        assert status.queued == left


def test_the_parts_of_a_task_are_one_task() -> None:
    parts = [
        events.Submitted(task=1, contribution=part, bytes=9, last=part == 2) for part in range(3)
    ]
    assert told(claimed(), *parts).done == 1


def test_a_task_is_followed_through_its_phases() -> None:
    status = told(events.Idle(reason="no_run", message="nothing runs"), claimed())
    assert (status.tasks[0].phase, status.idle) == ("claimed", "")
    status = fold(status, events.Fetching(task=1, what="data", done_bytes=5, total_bytes=9))
    assert (status.tasks[0].phase, status.tasks[0].done_bytes) == ("fetch", 5)
    status = fold(status, training(step=4))
    assert (status.tasks[0].phase, status.tasks[0].step, status.tasks[0].version) == ("train", 4, 3)
    status = fold(status, events.Uploading(task=1, done_bytes=1, total_bytes=9))
    status = fold(status, events.Submitted(task=1, contribution=1, bytes=9))
    assert (status.tasks[0].phase, status.done) == ("checking", 1)
    status = fold(fold(status, judged(1, "checking")), judged(1, "accepted"))
    assert status.tasks == ()
    assert [verdict.state for verdict in status.verdicts] == ["accepted"]


def test_every_reason_for_a_pause_is_kept_until_it_ends() -> None:
    mine = events.Paused(device="", by="you", message="paused", until="you resume")
    hot = events.Paused(device="cuda:0", by="temperature", message="92 °C", until="it cools")
    status = told(mine, hot)
    assert status.paused("cuda:0") is not None
    status = fold(status, events.Resumed(device="", by="you"))
    left = status.paused("cuda:0")
    assert left is not None
    assert left.by == "temperature"
    assert status.paused("cpu") is None


def test_all_is_paused_where_each_device_is() -> None:
    found = events.DevicesFound(devices=(), lent_bytes={"cpu": 0, "cuda:0": 0}, problems={})
    held = [events.Paused(device=name, by="you", message="paused") for name in ("cpu", "cuda:0")]
    assert told(found, claimed(), held[0]).paused() is None  # the other may begin at any time
    status = told(found, *held)
    pause = status.paused()
    assert pause is not None
    assert (pause.device, pause.by) == ("cpu", "you")
    assert fold(status, events.Resumed(device="", by="you")).paused() is None


def test_the_newest_of_a_kind_counts() -> None:
    beat = RunBeat(run="r", state="running", version=1, loss=3.0, needs=2, merge_in_s=9, workers=1)
    later = msgspec.structs.replace(beat, version=2)
    status = told(
        events.RunProgress(beat=beat, message=""), events.RunProgress(beat=later, message="")
    )
    assert [b.version for b in status.beats] == [2]
    assert told(training(task=9)).tasks == ()  # of a task that ended already


# Nobody can hold the agent up.


async def test_progress_that_nobody_read_is_replaced() -> None:
    hub = EventBus(VirtualClock())
    with hub.subscribe() as slow:
        for step in range(1, 8):
            hub.emit(training(step=step))
        hub.emit(events.Notice(level="info", message="a word"))
        hub.emit(training(step=9))
        seen = await drain(slow)
    assert [type(event).__name__ for event in seen] == ["Training", "Notice", "Training"]
    assert (seen[0].step, seen[2].step) == (7, 9)


async def test_a_subscriber_that_never_reads_costs_bounded_memory() -> None:
    hub = EventBus(VirtualClock())
    with hub.subscribe() as asleep:
        for number in range(3 * PENDING_MAX):
            hub.notice(f"{number}")
            hub.emit(training(task=number))
        seen = await drain(asleep)
    assert len(seen) == PENDING_MAX
    notices = [event for event in seen if isinstance(event, events.Notice)]
    assert notices[-1].message == f"{3 * PENDING_MAX - 1}"


async def test_events_carry_their_time_and_history_keeps_its_own() -> None:
    clock = VirtualClock(1000.0)
    hub = EventBus(clock)
    with hub.subscribe() as new:
        hub.notice("now")
        hub.emit(events.LossMeasured(at=5.0, run="r", version=0, loss=4.0, mine=0))
        assert [event.at for event in await drain(new)] == [1000.0, 5.0]
    assert hub.status.at == 1000.0


# Over the socket.


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[FakeEngine, Path]]:
    engine = FakeEngine()
    record = path / "control.json"
    async with ControlServer(engine.hub, engine._execute).serve(record):
        yield engine, record


async def next_event(control: Control) -> Any:
    with control.subscribe() as new:
        async for event in new:
            return event
    return None


async def test_whoever_attaches_sees_the_state_and_what_comes(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, record):
        engine.hub.emit(claimed(task=4))
        async with attach(record, engine.clock) as control:
            assert control.remote
            assert control.status == engine.hub.status
            coming = asyncio.ensure_future(next_event(control))
            await asyncio.sleep(0)
            engine.hub.emit(training(task=4, step=6))
            assert (await coming).step == 6
            assert control.status.tasks[0].step == 6


async def test_commands_and_their_errors_cross_the_socket(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, record), attach(record, engine.clock) as control:
        await control.do(commands.Pause(device="cpu", message="a film", until="it ends"))
        assert engine.asked[-1] == commands.Pause(device="cpu", message="a film", until="it ends")
        engine.answers[endpoints.LOSS] = (LossPoint(version=2, loss=3.5, at=1.0),)
        assert (await control.query(endpoints.LOSS, run="r"))[0].version == 2
        with pytest.raises(BadRequest, match="not a query"):
            await control.query(endpoints.LINK)
        engine.refuses = Configuration("threads must be a number")
        with pytest.raises(Configuration, match="threads"):
            await control.do(commands.SetSettings(changes={"threads": "x"}))


async def test_an_answer_that_nobody_waits_for_any_more_ends_nothing(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, record), attach(record, engine.clock) as control:
        engine.answers[endpoints.LOSS] = (LossPoint(version=2, loss=3.5, at=1.0),)
        asking = asyncio.ensure_future(control.query(endpoints.LOSS, run="r"))
        await asyncio.sleep(0)
        asking.cancel()  # a page was left, or asked again
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (await control.query(endpoints.LOSS, run="r"))[0].version == 2


async def test_a_picture_crosses_the_socket(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, record), attach(record, engine.clock) as control:
        engine.answers[commands.GetPicture] = bytes(range(256))
        assert await control.do(commands.GetPicture(run="digits", version=3)) == bytes(range(256))


async def test_many_may_watch_at_once(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (engine, record),
        attach(record, engine.clock) as one,
        attach(record, engine.clock) as two,
    ):
        both = asyncio.gather(next_event(one), next_event(two))
        await asyncio.sleep(0)
        engine.hub.notice("to all")
        assert [event.message for event in await both] == ["to all", "to all"]


async def test_the_end_of_the_volunteer_ends_the_watching(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, record), attach(record, engine.clock) as control:
        watching = asyncio.ensure_future(next_event(control))
        await asyncio.sleep(0)
        engine.hub.close()
        assert await watching is None
        with pytest.raises(Unreachable):
            await control.do(commands.Pause())


async def test_only_this_user_may_connect(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, record):
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        endpoint = msgspec.json.decode(record.read_bytes(), type=SocketAddress)
        if endpoint.path:
            assert stat.S_IMODE(os.stat(endpoint.path).st_mode) == 0o600
        forged = msgspec.structs.replace(endpoint, token="0" * 32)
        record.write_bytes(msgspec.json.encode(forged))
        with pytest.raises(Unreachable):
            async with attach(record, engine.clock):
                pass
        assert engine.asked == []


async def test_nonsense_on_the_socket_ends_that_connection_only(tmp_path: Path) -> None:
    async with served(tmp_path) as (engine, record):
        endpoint = msgspec.json.decode(record.read_bytes(), type=SocketAddress)
        for line in (b"\xff\n", b"[" * 5000 + b"\n", b"{}\n", b""):
            reader, writer = await asyncio.open_unix_connection(endpoint.path)
            writer.write(line)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        async with attach(record, engine.clock) as control:
            await control.do(commands.Retry())
        assert engine.asked == [commands.Retry()]


async def test_without_a_volunteer_there_is_a_sentence(tmp_path: Path) -> None:
    record = tmp_path / "control.json"
    with pytest.raises(Unreachable, match="no volunteer is running"):
        async with attach(record, VirtualClock()):
            pass
    record.write_bytes(msgspec.json.encode(SocketAddress(path=str(tmp_path / "gone.sock"))))
    with pytest.raises(Unreachable, match="no volunteer is running"):
        async with attach(record, VirtualClock()):
            pass


async def test_one_that_hangs_up_without_a_word_is_named_by_its_process(tmp_path: Path) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        record = tmp_path / "control.json"
        write_record(record, SocketAddress(port=port, token="t", pid=4321))
        with pytest.raises(Unreachable, match=r"process 4321\) does not answer"):
            async with attach(record, VirtualClock()):
                pass


@pytest.mark.parametrize("error", [ConnectionResetError("a page"), TimeoutError("a page")])
async def test_an_error_of_the_caller_is_not_blamed_on_the_volunteer(
    tmp_path: Path, error: OSError
) -> None:
    async with served(tmp_path) as (engine, record):
        with pytest.raises(type(error), match="a page"):
            async with attach(record, engine.clock):
                raise error


async def test_a_command_to_a_volunteer_that_has_said_its_last_is_answered(tmp_path: Path) -> None:
    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(msgspec.json.encode(StatusSnapshot(status=Status())) + b"\n")
        writer.write_eof()  # and it goes on listening
        await reader.read()
        writer.close()
        await writer.wait_closed()
        met.set()

    met = asyncio.Event()
    record, place = tmp_path / "control.json", tmp_path / "s"
    record.write_bytes(msgspec.json.encode(SocketAddress(path=str(place))))
    async with await asyncio.start_unix_server(meet, place), attach(record, VirtualClock()) as to:
        with to.subscribe() as events_:
            assert await drain(events_) == []  # to their end
        with pytest.raises(Unreachable, match="has ended"):
            await asyncio.wait_for(to.do(commands.Retry()), 10)
    await met.wait()


async def test_a_long_path_does_not_keep_the_socket_away(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    async with served(deep) as (engine, record), attach(record, engine.clock) as control:
        await control.do(commands.Retry())
    assert list(deep.iterdir()) == []


def test_every_command_that_is_answered_says_with_what() -> None:
    kinds = set(get_args(AnyCommand))
    assert {commands.Pause, commands.GetStatus, Query} <= kinds
    assert Command not in kinds
    assert commands.reply_type(commands.GetStatus()) is Status
    assert commands.reply_type(commands.GetInvitation()) is str
    assert commands.reply_type(commands.Pause()) is None
    for kind in kinds:
        assert get_args(kind.__orig_bases__[0]), kind


def test_the_list_of_runs_brings_the_last_version_of_a_run_that_has_ended() -> None:
    told = RunBeat(
        run=RUN.name, state="running", version=3, loss=2.0, needs=1, merge_in_s=None, workers=1
    )
    status = fold(Status(), events.RunProgress(beat=told, message=""))
    ended = msgspec.structs.replace(RUN, state="completed", version=9, loss=1.0)
    (beat,) = fold(status, events.RunsListed(runs=(ended,))).beats
    assert (beat.version, beat.loss, beat.state) == (9, 1.0, "completed")
    older = msgspec.structs.replace(RUN, version=2)
    assert fold(status, events.RunsListed(runs=(older,))).beats == (told,)
