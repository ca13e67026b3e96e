"""The agent against a real coordinator: work is done once, never lost, and the owner's word is
obeyed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from typing_extensions import override

from coordinator.database import datasets
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.tasks import tasks as tasks_table
from shared.errors import BadRequest, Unreachable
from shared.protocol import endpoints
from shared.protocol.members import MembersData
from shared.text import duration
from shared.workloads.base import ChunkRef, Config, Data, Job, TrainSettings, Weights, Work
from shared.workloads.gpt.workload import GptWorkload
from tests.support.local_coordinator import local_coordinator
from tests.support.local_volunteer import LONG, SHORT, LocalMachine, Network, Process, local_machine
from tests.tui import scenes
from volunteer.account.profile_directory import Profile
from volunteer.agent.run_choice import _terms
from volunteer.control import commands, events
from volunteer.control.event_sentences import words
from volunteer.machine.policy import MachineFacts


async def tasks(machine: LocalMachine) -> list[dict[str, Any]]:
    def read(conn: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in conn.execute(tasks_table.select()).mappings()]

    return await machine.home.coordinator.db.read(read)


async def contributions(machine: LocalMachine) -> list[Any]:
    def read(conn: Any) -> list[Any]:
        return list(conn.execute(contributions_table.select()))

    return await machine.home.coordinator.db.read(read)


async def training(process: Process) -> events.Training:
    """Training is well under way, and far from its end."""
    return await process.until(events.Training, lambda event: event.step >= 5)


async def test_tasks_are_done_and_paid(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=2) as process:
        assert await process.ended() == 0
        judged = process.all(events.Judged)
        assert {event.verdict.state for event in judged} <= {"accepted", "merged"}
        assert len(process.all(events.Submitted)) == 2
        last = process.all(events.Stopped)[-1]
        assert (last.code, last.tasks) == (0, 2)
        assert last.sent_bytes > 0
        assert await machine.home.coordinator.ledger.check() == ()


async def test_the_licence_is_told_and_the_yes_recorded(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        assert await process.ended() == 0
        told = [event.message for event in process.all(events.Notice)]
        assert any("CC0-1.0" in sentence for sentence in told)
        assert sum("POST /api/v1/runs/tiny/consent" in seen for seen in process.network.seen) == 1


MEMBERS = MembersData(
    dataset="mail", kind="tokens", heldout_share=0.1, train=TrainSettings(), batch_size=1
)


@pytest.mark.parametrize(
    ("facts", "samples", "end"),
    [
        ({"dataset": "", "dataset_licence": ""}, 0, "under CC0-1.0"),
        ({"dataset": "books", "dataset_licence": ""}, 0, ", no licence of the data is stated"),
        ({"dataset": "books", "dataset_licence": "MIT"}, 0, ", the data is under MIT"),
        ({"members": MEMBERS}, 0, "your own files: `volunteer data add tiny PATH`"),
        ({"members": MEMBERS}, 1, "your own files: 1 piece is prepared"),
        ({"members": MEMBERS}, 7, "your own files: 7 pieces are prepared"),
        ({"origin": "qwen", "origin_licence": "MIT"}, 0, ", it begins from qwen under MIT"),
        ({"contact": "mia@example.org"}, 0, ", questions to mia@example.org"),
    ],
)
def test_the_terms_of_a_run_name_what_it_has_and_nothing_else(
    facts: dict[str, Any], samples: int, end: str
) -> None:
    plain = {"dataset": "", "dataset_licence": "", "licence": "CC0-1.0", "contact": ""}
    info = replace(scenes.RUN, **(plain | {"origin": "", "members": None} | facts))
    terms = str(_terms("tiny", info, samples))
    assert terms.startswith('helping "tiny": the model will be published under CC0-1.0')
    assert terms.endswith(end)
    assert "licence of the data" not in terms or "stated" in end


async def test_without_a_yes_nothing_is_claimed(tmp_path: Path) -> None:
    flags = {"consent": "asked", "max_tasks": 1}
    async with local_machine(tmp_path) as machine, machine.working(**flags) as process:
        idle = await process.until(events.Idle, lambda event: event.reason == "consent")
        assert "licence" in idle.message
        assert not any("/claims" in seen for seen in process.network.seen)
        await process.control.do(commands.Consent(run="tiny"))
        assert await process.ended() == 0


async def test_pause_frees_the_device_and_keeps_the_task(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working(max_tasks=1) as process:
        before = await training(process)
        await process.control.do(commands.Pause())
        async with process.eventually():
            while (await process.control.query(endpoints.WORKERS, run="tiny"))[0].state != "paused":
                await machine.home.clock.advance(1)
        await process.control.do(commands.Resume())
        assert await process.ended() == 0
        assert {event.task for event in process.all(events.Claimed)} == {before.task}


async def test_stop_gives_the_task_back(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working(quit_s=0) as process:
        doing = await training(process)
        await process.control.do(commands.Stop())
        assert await process.ended() == 0
        ended = process.all(events.TaskEnded)[0]
        assert (ended.task, ended.how) == (doing.task, "released")
        rows = {row["id"]: row for row in await tasks(machine)}
        assert rows[doing.task]["state"] == "todo"
        assert rows[doing.task]["failures"] == 0


async def test_a_task_that_needs_only_seconds_more_is_finished_on_stop(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine:
        machine.speed = 1.0  # the end is bounded in seconds, which a busy test machine needs
        async with machine.working(quit_s=600) as process:
            await training(process)
            await process.control.do(commands.Stop())
            assert await process.ended(60) == 0
        assert len(await contributions(machine)) == 1


async def test_finish_completes_the_task_and_takes_no_more(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working() as process:
        doing = await training(process)
        await process.control.do(commands.Finish())
        await process.until(events.Submitted, lambda event: event.task == doing.task)
        await process.until(events.Idle, lambda event: event.reason == "finished")
        assert len(await contributions(machine)) == 1
        await process.control.do(commands.Resume())
        await process.until(events.Claimed, lambda event: event.task != doing.task)


async def test_finish_ends_a_task_that_an_outage_keeps_from_beginning(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working() as process:
        process.network.refuse("/begin")
        held = await process.until(events.Claimed)
        await process.until(events.Connection, lambda event: not event.online)
        await process.control.do(commands.Finish())
        process.network.heal()
        ended = await process.until(events.TaskEnded)
        assert (ended.task, ended.how) == (held.task, "released")
        await process.until(events.Idle, lambda event: event.reason == "finished")
        assert not process.all(events.Training)


async def test_a_killed_volunteer_goes_on_with_its_task(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine:
        async with machine.working(snapshot_s=0.01) as process:
            doing = await training(process)
        async with machine.working(max_tasks=1) as process:
            again = await process.until(events.Training)
            assert again.task == doing.task
            assert again.step > 0  # from the snapshot
            assert await process.ended() == 0
        assert len(await contributions(machine)) == 1
        assert [row["attempt"] for row in await tasks(machine) if row["id"] == doing.task] == [1]


async def test_a_lost_reply_to_a_claim_brings_the_same_lease(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        process.network.lose("/claims")
        assert await process.ended() == 0
        assert sum("/claims" in seen for seen in process.network.seen) == 2
        assert [row["attempt"] for row in await tasks(machine)] == [1]
        assert len(await contributions(machine)) == 1


async def test_a_lost_reply_to_a_submission_pays_once(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        process.network.lose("/submit")
        assert await process.ended() == 0
        assert sum("/submit" in seen for seen in process.network.seen) == 2
        assert len(await contributions(machine)) == 1
        assert await machine.home.coordinator.ledger.check() == ()


async def test_after_a_lost_reply_no_byte_of_a_part_is_sent_again(tmp_path: Path) -> None:
    """The lease goes on meanwhile, so that an upload for it could be begun."""
    parts = SHORT.replace('preset = "fedavg"', 'preset = "async-sgd"')
    async with local_machine(tmp_path, parts) as machine, machine.working(max_tasks=1) as process:
        process.network.lose("/submit")
        assert await process.ended() == 0
        seen = process.network.seen
        assert sum("/submit" in each for each in seen) == 3
        assert sum(each.startswith("PUT ") for each in seen) == 2
        assert len(await contributions(machine)) == 2
        assert await machine.home.coordinator.ledger.check() == ()


async def test_a_result_outlives_the_process_that_could_not_send_it(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        async with machine.working(max_tasks=1) as process:
            process.network.refuse("/uploads")
            down = await process.until(
                events.Connection, lambda event: not event.online and event.queued == 1
            )
            assert down.retry_at is not None
        assert await contributions(machine) == []
        async with machine.working(max_tasks=1) as process:
            await process.until(events.Submitted)
        assert len(await contributions(machine)) >= 1


class Newer(httpx.AsyncBaseTransport):
    """Answers a submission as no version known here does."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        headers = {"x-request-id": response.headers["x-request-id"]}
        newer = httpx.Response(200, headers=headers, stream=httpx.ByteStream(b"[]"))
        return newer if "/submit" in request.url.path else response


async def test_a_reply_that_is_not_understood_ends_it_and_keeps_the_result(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        async with machine.working(max_tasks=1) as process:
            process.network.inner = Newer(process.network.inner)
            assert await process.ended() == 78
            assert sum("/submit" in seen for seen in process.network.seen) == 1
            said = process.all(events.Stopped)[-1].message
            assert "is not understood" in said
            assert "volunteer update" in said
        async with machine.working(max_tasks=1) as process:  # upgraded
            await process.until(events.Submitted)
        assert len(await contributions(machine)) >= 1
        assert await machine.home.coordinator.ledger.check() == ()


async def test_work_goes_on_when_the_network_comes_back(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        process.network.refuse("/begin")
        await process.until(events.Connection, lambda event: not event.online)
        process.network.heal()
        await process.control.do(commands.Retry())
        assert await process.ended() == 0


async def test_an_outage_is_told_once_and_its_end_with_how_long_it_was(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working() as process:
        await training(process)
        process.network.cut = True
        away = await process.until(events.Connection, lambda event: not event.online)
        for _ in range(3):  # of the heartbeat, of listings, of whoever else asks
            await process.until(events.Connection, lambda event: event.repeated)
        process.network.heal()
        await process.control.do(commands.Retry())
        back = await process.until(
            events.Connection, lambda event: event.online and event.since == away.at
        )
        told = [said for e in process.all(events.Connection) if (said := words(e)) is not None]
        assert len(told) == 3
        assert told[0] == "the coordinator answers"
        assert told[1].startswith("coordinator unreachable")
        assert told[2] == f"the coordinator answers again, after {duration(back.at - away.at)}"


async def test_the_cause_of_an_outage_is_told_again_when_it_changes(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working() as process:
        await training(process)
        process.network.cut = True
        first = await process.until(events.Connection, lambda event: not event.online)
        process.network.failure = httpx.ReadTimeout
        await process.control.do(commands.Retry())
        other = await process.until(
            events.Connection,
            lambda event: not event.online and event.message != first.message,
        )
        assert not other.repeated
        assert other.since == first.at
        assert str(other.message) in str(words(other))
        await process.until(
            events.Connection,
            lambda event: event.repeated and event.message == other.message,
        )
        process.network.heal()


async def test_why_there_is_no_work_is_told_once_however_often_it_is_asked_for(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path) as machine:
        await machine.home.coordinator.runs.pause("tiny")
        async with machine.working() as process:
            async with process.eventually():
                while len([e for e in process.all(events.Idle) if e.until is not None]) < 3:
                    await machine.home.clock.advance(1)
            told = [said for e in process.all(events.Idle) if (said := words(e)) is not None]
            assert len(told) == len({said.partition(";")[0] for said in told})


async def test_going_on_with_one_device_lifts_no_rule_while_its_owner_pauses_all(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path) as machine:
        machine.read = lambda rules, devices: MachineFacts(on_battery=True)
        async with machine.working() as process:
            await process.until(events.Paused, lambda event: event.by == "battery")
            await process.control.do(commands.Pause())
            await process.control.do(commands.Resume(device="cpu"))
            await process.control.do(commands.Pause(device="cpu"))
            await process.until(events.Paused, lambda event: event.device == "cpu")
            assert not [e for e in process.all(events.Notice) if "working although" in e.message]
            assert process.control.status.paused("cpu") is not None


async def test_a_pause_for_a_time_ends_by_itself_and_no_other_with_it(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working() as process:
        await process.until(events.Training)
        now = process.engine.world.clock.now
        await process.control.do(commands.Pause(until="22:00", ends_at=now() + 60))
        await process.control.do(commands.Pause(device="cpu"))
        paused = await process.until(events.Paused)
        assert words(paused) == "paused by you until 22:00"
        over = await process.until(events.Resumed)
        assert (over.device, over.by, over.by_time) == ("", "you", True)
        assert [pause.device for pause in process.control.status.pauses] == ["cpu"]
        await process.control.do(commands.Resume())
        process.told.clear()
        await process.until(events.Training)
        await process.control.do(commands.Pause(until="22:00", ends_at=now() + 60))
        await process.until(events.Resumed)
        process.told.clear()
        await process.until(events.Training)  # it goes on without a word of its owner


async def test_a_device_that_is_not_lent_is_not_called_paused(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working() as process:
        await training(process)
        for command in (commands.Pause(device="cuda0"), commands.Resume(device="cuda0")):
            with pytest.raises(BadRequest, match='no device "cuda0" is lent here: cpu'):
                await process.control.do(command)
        assert process.control.status.pauses == ()
        assert process.all(events.Paused) == []


async def test_taking_a_finish_back_lifts_no_rule(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine:
        machine.read = lambda rules, devices: MachineFacts(on_battery=True)
        async with machine.working() as process:
            await process.until(events.Paused, lambda event: event.by == "battery")
            await process.control.do(commands.Finish())
            await process.control.do(commands.Resume())
            resumed = await process.until(events.Resumed)
            assert resumed.message == "no longer finishing, but paused by battery: on battery"
            assert not process.control.status.finishing
            await process.control.do(commands.Finish())
            async with process.eventually():
                while len(process.all(events.Finishing)) < 2:
                    await process.tick()
            assert not [e for e in process.all(events.Notice) if "working although" in e.message]


async def test_it_can_be_stopped_while_its_account_waits_for_the_coordinator(
    tmp_path: Path,
) -> None:
    async with local_machine(tmp_path) as machine:
        profile = Profile(machine.directories.profile)
        identity = profile.current()
        assert identity is not None
        profile.use(replace(identity, registered=False))
        async with machine.working() as process:
            for _ in range(1000):
                process.network.lose("/register")
            async with process.eventually():
                while not process.network.seen:
                    await asyncio.sleep(0.01)
            process.engine.stop()
            assert await process.ended() == 0


async def test_joining_a_coordinator_that_goes_away_meanwhile_ends_with_what_to_do(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        machine, network = LocalMachine(tmp_path / "machine", home), Network(home.transport)
        network.refuse("/register")
        with pytest.raises(Unreachable, match=r"cannot be reached.*join again with the same link"):
            async with asyncio.timeout(120):
                await machine.join(network=network)
        network.heal()
        joined = await machine.join(network=network)
        assert (joined.created, joined.nickname) == (True, "Ann")
        assert [person.nickname for person in await home.coordinator.volunteers.list()] == ["Ann"]


async def test_a_cancelled_task_is_dropped(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working() as process:
        doing = await training(process)
        await machine.home.coordinator.runs.stop("tiny")
        ended = await process.until(events.TaskEnded)
        assert ended.task == doing.task
        assert ended.how == "cancelled"
        await process.until(events.Idle)
        assert await contributions(machine) == []


async def test_a_banned_volunteer_ends_for_good(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine, machine.working() as process:
        await training(process)
        await machine.home.coordinator.volunteers.ban("Ann")
        assert await process.ended() == 78
        assert "banned" in process.all(events.Stopped)[-1].message


class Broken(GptWorkload):
    """A workload that cannot begin."""

    @override
    def begin(self, *args: Any) -> Any:
        raise RuntimeError("the device fell off the bus")


async def test_a_failing_device_says_so_and_waits_longer_each_time(tmp_path: Path) -> None:
    async with (
        local_machine(tmp_path) as machine,
        machine.working(lambda name: Broken()) as process,
    ):
        told = await process.until(events.Notice, lambda event: event.level == "error")
        assert "fell off the bus" in told.message
        ended = process.all(events.TaskEnded)
        assert {event.how for event in ended} == {"failed"}
        waits = [
            e.until - e.at for e in process.all(events.Idle) if e.reason == "failing" and e.until
        ]
        assert waits == sorted(waits)
        assert await contributions(machine) == []


class Emptied(GptWorkload):
    """A workload whose data are deleted before it reads them, with the whole cache, once."""

    def __init__(self) -> None:
        self.deleted = False

    @override
    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        if not self.deleted:
            self.deleted = True
            shutil.rmtree(data.chunk(0).parents[1])
        return super().begin(job, weights, data, device)


async def test_a_cache_deleted_during_a_task_gives_the_task_back(tmp_path: Path) -> None:
    emptied = Emptied()
    async with (
        local_machine(tmp_path) as machine,
        machine.working(lambda name: emptied, max_tasks=1) as process,
    ):
        assert await process.ended() == 0
        first, last = process.all(events.TaskEnded)[0], process.all(events.Submitted)[-1]
        assert first.how == "released"
        assert "deleted from the cache" in first.message
        assert last.last
        assert {row["failures"] for row in await tasks(machine)} == {0}


class Crowded(GptWorkload):
    """A workload whose machine can open no file while the next task's data are fetched ahead."""

    def __init__(self) -> None:
        self.calls = 0

    @override
    def files(self, config: Config) -> Mapping[str, ChunkRef]:
        self.calls += 1
        if self.calls == 4:  # the first task asks three times
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().files(config)


async def test_no_file_of_a_task_at_work_is_evicted_from_the_cache(tmp_path: Path) -> None:
    async with (
        local_machine(tmp_path, LONG) as machine,
        machine.working(max_tasks=1) as process,
    ):
        await training(process)
        assert process.engine._agent is not None
        cache = process.engine._agent.store.cache
        manifest = await machine.home.coordinator.db.read(
            lambda conn: datasets.by_name(conn, "sums").manifest
        )
        names = {ref.sha256 for ref in (*manifest.chunks, *manifest.assets.values())}
        cache.limit_bytes = 0
        cache.trim()
        present = {path.name for path in machine.directories.cache.rglob("*") if path.is_file()}
        assert names - present == set()


async def test_a_fault_of_this_machine_while_it_fetches_ahead_ends_nothing(tmp_path: Path) -> None:
    crowded = Crowded()
    async with (
        local_machine(tmp_path) as machine,
        machine.working(lambda name: crowded, max_tasks=2) as process,
    ):
        assert await process.ended() == 0
        assert crowded.calls > 4
        assert process.all(events.Stopped)[-1].tasks == 2


async def test_a_device_too_small_for_the_benchmark_works_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: Any) -> float:
        raise RuntimeError("out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("volunteer.machine.benchmark._step", step)
    async with (
        local_machine(tmp_path) as machine,
        machine.working(measure=True, max_tasks=1) as process,
    ):
        assert await process.ended() == 0
        told = [event.message for event in process.all(events.Notice) if event.level == "warning"]
        assert any("cpu could not be measured" in sentence for sentence in told)
        assert process.all(events.Benchmarked) == []
        assert process.all(events.Stopped)[-1].tasks == 1


class Greedy(GptWorkload):
    """A workload that does not fit the memory at first."""

    @override
    def begin(self, *args: Any) -> Any:
        work = super().begin(*args)
        advance = work.advance
        refused: list[bool] = []

        def hungry() -> Any:
            if not refused:
                refused.append(True)
                raise MemoryError("out of memory")
            return advance()

        work.advance = hungry  # type: ignore[method-assign]
        return work


async def test_out_of_memory_halves_the_micro_batch_and_pays_the_same(tmp_path: Path) -> None:
    async with (
        local_machine(tmp_path) as machine,
        machine.working(lambda name: Greedy(), max_tasks=1) as process,
    ):
        assert await process.ended() == 0
        assert process.all(events.Halved)[0].micro_batch == 1
        claimed = process.all(events.Claimed)[0]
        paid = [event.verdict.credits_micro for event in process.all(events.Judged)]
        assert set(paid) == {claimed.price_micro}


async def test_a_second_machine_of_the_same_account_may_come_by_a_link_code(tmp_path: Path) -> None:
    async with local_machine(tmp_path) as machine, machine.working(max_tasks=1) as process:
        await process.until(events.Started)
        code = await process.control.do(commands.MakeLink())
        second = LocalMachine(tmp_path / "second", machine.home)
        key = machine.link.partition("#")[2]
        joined = await second.engine().control.do(
            commands.Join(link=f"http://127.0.0.1:1/join#{key}+code={code.code}")
        )
        assert joined.nickname == "Ann"
        assert await process.ended() == 0


async def test_going_on_says_once_what_still_holds_it_back(tmp_path: Path) -> None:
    async with local_machine(tmp_path, LONG) as machine:
        machine.read = lambda rules, devices: MachineFacts(disk_free_bytes=0)
        async with machine.working() as process:
            await process.until(events.Paused, lambda event: event.by == "disk")
            await process.control.do(commands.Resume())
            said = await process.until(events.Notice, lambda e: e.message.startswith("still"))
            assert (
                said.message == "still paused: only 0.0 GiB of disk are free, until 1 GiB are free"
            )
            assert process.all(events.Resumed) == []
