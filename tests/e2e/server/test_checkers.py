"""Tasks done again by a machine of the organiser's own: a real server, real volunteers, and the
command that organisers type.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from coordinator.admin import checker_commands
from coordinator.admin.checker_commands import HeldRecompute, ReportRecompute, TakeRecompute
from coordinator.admin.checker_machine import BlobFolder, Checker, CheckerResult, CheckerStep
from coordinator.admin.command import CommandSender, OrganiserCommand, Q, R
from coordinator.admin.remote_server import RemoteServer
from coordinator.checking.checkers import CheckerOutcome
from coordinator.checking.recompute_comparison import machine_of
from coordinator.checking.recompute_queue import RecomputeTask
from coordinator.compute import Compute
from coordinator.database import recomputes
from coordinator.database.tables.trust import recomputes as rows
from coordinator.rules.draws import HOLD_S, ComputeDevice, Redone
from shared.errors import BadRequest, Configuration, Internal, NotFound, Unauthorized
from tests.e2e.server.test_recomputes import balances, lazy, results, run_file
from tests.support.command_line import Run
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.served import served

CPU = ComputeDevice(kind="cpu")
CARD = ComputeDevice(kind="cuda", model="A Card 12 GB")
TASKS = 3


@asynccontextmanager
async def drawn(
    path: Path, database: str, load: Any = None, tasks: int = TASKS
) -> AsyncIterator[LocalCoordinator]:
    """A coordinator whose volunteer did tasks; a checker was seen before, so that
    they wait for it.
    """
    async with local_coordinator(path / "coordinator", database=database) as home:
        await home.start_run(run_file())
        await seen(home, "checker")
        async with home.coordinator.working():
            machine = LocalMachine(path / "machine", home)
            await machine.join("Ann")
            async with machine.working(load, max_tasks=tasks) as process:
                await process.ended(120)
                await states(home, {"waiting": tasks})
        home.coordinator.stopping.clear()
        yield home


async def seen(home: LocalCoordinator, name: str) -> None:
    now = home.clock.now()
    await home.coordinator.db.write(lambda conn: recomputes.see_checker(conn, name, "cpu", now))


async def states(home: LocalCoordinator, wanted: dict[str, int]) -> None:
    """Wait until recomputes are in these states."""

    def read(conn: Connection) -> dict[str, int]:
        found: dict[str, int] = {}
        for state in conn.execute(select(rows.c.state)).scalars():
            found[state] = found.get(state, 0) + 1
        return found

    async with asyncio.timeout(120):
        while await home.coordinator.db.read(read) != wanted:
            await asyncio.sleep(0.02)


def asks(home: LocalCoordinator) -> CommandSender:
    """Commands of the organiser, without a network."""

    async def ask(command: OrganiserCommand[Q, R], ask: Q, /) -> R:
        return await command.run(home.coordinator, ask)

    return ask


def wanted(hold: str, name: str = "x", machine: ComputeDevice = CPU) -> TakeRecompute:
    return TakeRecompute(name=name, machine=machine, hold=hold)


async def taken_by(ask: CommandSender, hold: str, name: str = "x") -> RecomputeTask:
    task = (await ask(checker_commands.take, wanted(hold, name))).task
    assert task is not None
    return task


def checker(
    home: LocalCoordinator, machine: ComputeDevice, told: list[CheckerStep | CheckerResult]
) -> Checker:
    of = (f"desk/{machine.kind}", "cpu", machine)  # whatever it says: there is no card here
    return Checker(asks(home), home.coordinator.blobs, Compute("checker"), of, told.append)


async def test_a_checker_elsewhere_does_honest_work_again(
    tmp_path: Path, database_url: str
) -> None:
    async with drawn(tmp_path, database_url) as home, served(home) as url:
        server = RemoteServer.of(url, home.coordinator.settings.admin_token_file)

        async def ask(command: OrganiserCommand[Q, R], ask: Q, /) -> R:
            return await asyncio.to_thread(server.call, command, ask)

        folder = tmp_path / "fetched"
        folder.mkdir()
        told: list[CheckerStep | CheckerResult] = []
        blobs = BlobFolder(server, folder, most=0)
        one = Checker(ask, blobs, Compute("checker"), ("desk/cpu", "cpu", CPU), told.append)
        await one.run(asyncio.Event(), once=True)
        assert {result for result, _ in await results(home, TASKS)} == {"passed"}
        assert one.summary.results["passed"] == TASKS
        assert one.summary.seconds > 0
        steps = [each for each in told if isinstance(each, CheckerStep)]
        assert {each.step for each in steps} >= {each.steps for each in steps}
        assert len([each for each in told if isinstance(each, CheckerResult)]) == TASKS
        assert not [*folder.iterdir()]  # nothing of others stays
        lines = await home.coordinator.transparency.record_lines(None, 100)
        assert ("checker.work", "desk/cpu") in {(line.action, line.subject) for line in lines}
        assert await home.coordinator.ledger.check() == ()


async def test_what_a_checker_finds_made_up_ends_its_account(
    tmp_path: Path, database_url: str
) -> None:
    async with drawn(tmp_path, database_url, lazy, tasks=1) as home:
        told: list[CheckerStep | CheckerResult] = []
        assert await checker(home, CPU, told).next(asyncio.Event())
        assert isinstance(told[-1], CheckerResult)
        assert told[-1].result == "failed"
        assert await balances(home, "Ann") == ("suspended", 0, 0)
        assert await home.coordinator.ledger.check() == ()


async def test_another_class_of_device_suspends_nobody(tmp_path: Path) -> None:
    async with drawn(tmp_path, "", lazy, tasks=1) as home:
        ask = asks(home)
        task = await taken_by(ask, "a" * 32)
        report = ReportRecompute(
            contribution=task.contribution,
            hold="a" * 32,
            machine=ComputeDevice(kind="cuda", model="A Card"),
            outcome=CheckerOutcome(found=Redone(cosine=0.1, norm_ratio=2.0)),
        )
        verdict = await ask(checker_commands.report, report)
        assert verdict.result == "unproven"
        assert "cuda (A Card) cannot be compared" in verdict.message
        # a report whose reply was lost
        assert await ask(checker_commands.report, report) == verdict
        assert (await balances(home, "Ann"))[0] == "vetted"  # she was vouched for


async def test_a_hold_that_is_not_renewed_goes_to_another(
    tmp_path: Path, database_url: str
) -> None:
    async with drawn(tmp_path, database_url, tasks=1) as home:
        ask = asks(home)
        first = await taken_by(ask, "a" * 32)
        assert await taken_by(ask, "a" * 32) == first
        recompute = HeldRecompute(contribution=first.contribution, hold="a" * 32)
        assert (await ask(checker_commands.take, wanted("b" * 32, "y"))).task is None
        assert (await ask(checker_commands.renew, recompute)).held
        await home.clock.advance(HOLD_S + 1)
        second = await taken_by(ask, "b" * 32, "y")
        assert second.contribution == first.contribution
        assert not (await ask(checker_commands.renew, recompute)).held
        differing = ReportRecompute(
            contribution=first.contribution,
            hold="a" * 32,
            machine=CPU,
            outcome=CheckerOutcome(found=Redone(cosine=0.0, norm_ratio=1.0)),
        )
        with pytest.raises(Exception, match="another's by now"):
            await ask(checker_commands.report, differing)
        with pytest.raises(BadRequest, match="32 hexadecimal"):
            await ask(checker_commands.take, wanted("x"))
        second_card = wanted("c" * 32, machine=ComputeDevice(kind="cuda:0"))
        with pytest.raises(BadRequest, match="not a class of devices"):
            await ask(checker_commands.take, second_card)
        unknown = ReportRecompute(
            contribution=99, hold="c" * 32, machine=CPU, outcome=CheckerOutcome()
        )
        with pytest.raises(NotFound, match="not to be done again"):
            await ask(checker_commands.report, unknown)


async def test_one_that_is_stopped_gives_back_and_what_two_cannot_do_the_server_does(
    tmp_path: Path,
) -> None:
    async with drawn(tmp_path, "", tasks=1) as home:
        stop = asyncio.Event()
        told: list[CheckerStep | CheckerResult] = []
        loop = asyncio.get_running_loop()

        def tell(seen: CheckerStep | CheckerResult) -> None:
            told.append(seen)
            if isinstance(seen, CheckerStep) and seen.step == 1:  # on the thread that computes
                asyncio.run_coroutine_threadsafe(_set(stop), loop).result()

        of = ("desk/cpu", "cpu", CPU)
        one = Checker(asks(home), home.coordinator.blobs, Compute("checker"), of, tell)
        await one.run(stop)
        assert one.summary.results["given back"] == 1
        assert isinstance(told[-1], CheckerResult)
        assert told[-1].message == "it was interrupted"
        one = Checker(asks(home), Nothing(), Compute("checker"), of, told.append)
        await one.run(asyncio.Event(), once=True)
        assert one.summary.results["given back"] == 2
        assert await home.coordinator.recomputes.next()
        assert [result for result, _ in await results(home, 1)] == ["passed"]


async def test_a_library_that_a_checker_lacks_is_no_fault_of_the_volunteer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with drawn(tmp_path, "", tasks=1) as home:
        told: list[CheckerStep | CheckerResult] = []
        one = checker(home, CPU, told)
        with monkeypatch.context() as without:
            without.setattr(
                "coordinator.admin.checker_machine.missing_library", lambda case: "few_bits"
            )
            assert await one.next(asyncio.Event())
        assert one.summary.results["given back"] == 1
        assert "few_bits is not installed here" in told[-1].message  # type: ignore[union-attr]
        assert await one.next(asyncio.Event())
        assert [result for result, _ in await results(home, 1)] == ["passed"]


class Nothing:
    """Stored files, of which there are none."""

    async def local(self, sha256: str) -> Path:
        raise NotFound("there is no such blob")


async def _set(stop: asyncio.Event) -> None:
    stop.set()
    await asyncio.sleep(0)


async def test_the_server_leaves_to_checkers_what_they_are_there_for(tmp_path: Path) -> None:
    async with drawn(tmp_path, "", tasks=1) as home:
        assert not await home.coordinator.recomputes.next()
        told: list[CheckerStep | CheckerResult] = []
        one = checker(home, CARD, told)  # it has nothing to compare a processor with
        assert not await one.next(asyncio.Event())
        await home.clock.advance(601)  # a checker with a processor was not seen for ten minutes
        assert await home.coordinator.recomputes.next()
        assert [result for result, _ in await results(home, 1)] == ["passed"]


async def test_any_blob_is_for_the_organiser_alone(tmp_path: Path) -> None:
    async with drawn(tmp_path, "", tasks=1) as home, served(home) as url:
        server = RemoteServer.of(url, home.coordinator.settings.admin_token_file)
        task = await taken_by(asks(home), "a" * 32)
        name, path = task.given.sha256, tmp_path / "update"
        await asyncio.to_thread(server.blob, name, path)
        whole = path.read_bytes()
        path.write_bytes(whole[:100])  # it broke off
        await asyncio.to_thread(server.blob, name, path)
        assert path.read_bytes() == whole
        await asyncio.to_thread(server.blob, name, path)  # all of it is here
        path.write_bytes(b"x" * len(whole))
        with pytest.raises(Internal, match="other bytes"):
            await asyncio.to_thread(server.blob, name, path)
        assert not path.exists()
        with pytest.raises(NotFound):
            await asyncio.to_thread(server.blob, "0" * 64, path)
        token = tmp_path / "token"
        token.write_text("0" * 64)
        with pytest.raises(Unauthorized):
            await asyncio.to_thread(RemoteServer.of(url, token).blob, name, path)
        worker = await home.join("Eve")
        assert (await worker.get(f"/admin/blobs/{name}")).status_code in (401, 403)
        assert (await worker.get(f"/blobs/{name}")).status_code == 404


def test_the_command_on_a_data_directory(tmp_path: Path, run: Run) -> None:
    async def prepared() -> None:
        async with drawn(tmp_path, ""):
            pass

    asyncio.run(prepared())
    place = ("--data-dir", tmp_path / "coordinator")
    words = ("checker", "work", "--once", "--device", "cpu", "--threads", "1")
    said = run(*words, "--json", *place)
    assert said.code == 0, said.err
    written = [line for line in said.out.splitlines() if line.startswith("{")]
    *lines, last = map(json.loads, written)
    assert [line["result"] for line in lines] == ["passed"] * TASKS
    assert last["results"]["passed"] == TASKS
    said = run(*words, *place)
    assert "nothing done again" in said.out
    assert "Ctrl+C" in said.out
    assert run("checker", "work", "--once", "--threads", "-1", *place).code != 0


def test_a_device_that_is_not_here_is_refused() -> None:
    assert machine_of("cpu") == ("cpu", CPU)
    for name in ("cuda:99", "tpu", "cuda:x"):
        with pytest.raises(Configuration, match="it has cpu"):
            machine_of(name)
