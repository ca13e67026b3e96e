"""Audits of all kinds of work: what goes on from a state and a residual, what ships gradients,
pictures, language models of a library, and learners of games. Real volunteers and a real server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.trust import recomputes
from coordinator.rules import audits as rules
from shared.decoding import decode
from shared.errors import NotFound, TooLarge
from shared.workloads.base import Workload
from tests.e2e.server.test_audits import (
    audited,
    escrow,
    line_is_long,
    organiser,
    proven,
    result,
    until,
)
from tests.e2e.server.test_checkers import seen, states
from tests.e2e.server.test_recomputes import balances, flipped, run_file, settled
from tests.e2e.workloads.test_causal_lm import RUN as CAUSAL
from tests.e2e.workloads.test_causal_lm import TRAINED
from tests.e2e.workloads.test_dcgan import PRESETS, RUN, copied
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine, Process
from tests.support.selfplay_run import RUN as GAMES
from tests.support.served import served
from volunteer.control import commands, events

AUDITED = "[trust]\nrecompute = 1.0\n"


async def started(
    home: LocalCoordinator, workload: str, preset: str, codec: str, trust: str = AUDITED
) -> None:
    """Start a run whose work is audited; of a language model `preset` is what is trained of it."""
    if workload == "gpt":
        await home.start_run(run_file(codec, preset))
        return
    if workload == "causal-lm":
        text = CAUSAL.format(model=TRAINED[preset]).replace("quorum = 2", "quorum = 1")
        await home.start_run(text.replace("int8", codec) + trust)
        return
    if workload == "gomoku":
        quick = GAMES.replace("simulations = 16", "simulations = 8").replace("float32", codec)
        await home.coordinator.runs.create(quick + trust)
        await home.coordinator.runs.start("gomoku")
        return
    await home.coordinator.datasets.add(copied)
    text = RUN.replace("[plan]\n", "[plan]\n" + PRESETS[preset]).replace("int8", codec)
    await home.coordinator.runs.create(text + trust)
    await home.coordinator.runs.start("digits")


@pytest.fixture(autouse=True)
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing done again by the organiser but what differs."""
    monkeypatch.setattr(rules, "confirmed_chance", lambda freed, stake: 0.0)


@asynccontextmanager
async def working(who: LocalMachine, workload: str, load: Any = None) -> AsyncIterator[Process]:
    """A volunteer that has done a task; of games one that goes on, for those that it learns from
    come first.
    """
    if workload == "gomoku":
        async with who.working(load) as process:
            yield process
        return
    async with who.working(load, max_tasks=1) as process:
        assert await process.ended(120) == 0
        yield process


async def worked(home: LocalCoordinator, who: LocalMachine, workload: str) -> None:
    """Let a volunteer do a task whose kind is audited."""

    def learnt(conn: Connection) -> int:
        done = select(contributions.c.id).where(contributions.c.kind == "delta")
        return len(conn.execute(done.where(contributions.c.state == "merged")).all())

    async with working(who, workload) as process:
        if workload == "gomoku":
            async with process.eventually(60):
                while not await home.coordinator.db.read(learnt):
                    await process.tick()
            await process.control.do(
                commands.Stop(how="finish")
            )  # killed, it would leave questions open
            assert await process.ended(60) == 0


@asynccontextmanager
async def done(
    path: Path,
    of: tuple[str, str, str],
    database: str = "",
    load: Any = None,
    *,
    offered: bool = True,
) -> AsyncIterator[tuple[LocalCoordinator, LocalMachine]]:
    """A coordinator where Ann did two tasks, of whom the second is to be audited, for there was
    nobody who could before; and Bob, who may.
    """
    async with line_is_long(), local_coordinator(path / "coordinator", database=database) as home:
        await started(home, *of)
        ann, bob = LocalMachine(path / "ann", home), LocalMachine(path / "bob", home)
        await ann.join("Ann")
        async with home.coordinator.working():
            organiser(home)
            await worked(home, ann, of[0])
            await settled(home)
            organiser(home, at_work=False)
            await bob.join("Bob")
            await proven(home, "Bob")
            async with working(ann, of[0], load):  # from files alone
                await (
                    until(home, "waiting") if offered else states(home, {"waiting": 1, "done": 1})
                )
            yield home, bob


KINDS = [
    ("gpt", "fedavg", "int4"),
    ("gpt", "sync-sgd", "int8"),
    ("dcgan", "gradient-average", "int8"),
    ("causal-lm", "lora", "int8"),
    ("causal-lm", "all", "int8"),
    ("gomoku", "learn", "int8"),
]


async def answered(home: LocalCoordinator, bob: LocalMachine, workload: str) -> None:
    """Let Bob do the audit, whatever else he is given before."""
    async with working(bob, workload):
        answer = select(recomputes.c.answer_id).where(recomputes.c.answer_id.is_not(None))
        async with asyncio.timeout(120):
            while not await home.coordinator.db.read(lambda conn: conn.execute(answer).first()):
                await asyncio.sleep(0.02)
        organiser(home)
        await until(home, "done")


async def agrees(home: LocalCoordinator, bob: LocalMachine, workload: str = "gpt") -> None:
    await answered(home, bob, workload)
    assert await result(home) == "passed"
    assert await escrow(home, "Bob") > 0
    assert (await balances(home, "Ann"))[0] == "vetted"
    assert await home.coordinator.ledger.check() == ()


async def test_an_audit_is_done_on_both_databases(tmp_path: Path, database_url: str) -> None:
    async with done(tmp_path, ("gpt", "fedavg", "int8"), database_url) as (home, bob):
        await agrees(home, bob)


# One of gradients and one of adapters are looked at each time, the others with the slow tests.
BRIEF = (KINDS[1], KINDS[3])


def kinds(*of: tuple[str, str, str]) -> pytest.MarkDecorator:
    """Return the kinds to test, those that are not brief as slow ones."""
    marked = [pytest.param(each, marks=[] if each in BRIEF else pytest.mark.slow) for each in of]
    return pytest.mark.parametrize("of", marked)


@kinds(*KINDS)
async def test_an_audit_of_any_kind_of_work_agrees_with_what_is_honest(
    tmp_path: Path, of: tuple[str, str, str]
) -> None:
    async with done(tmp_path, of) as (home, bob):
        await agrees(home, bob, of[0])


@kinds(KINDS[1], ("dcgan", "fedavg", "int8"), *KINDS[3:])
async def test_an_audit_of_any_kind_of_work_finds_what_was_made_up(
    tmp_path: Path, of: tuple[str, str, str]
) -> None:
    async with done(tmp_path, of, load=flipped) as (home, bob):
        await answered(home, bob, of[0])
        assert await result(home) == "failed"
        assert (await balances(home, "Ann"))[0] == "suspended"
        assert (await balances(home, "Bob"))[0] == "vetted"
        assert await home.coordinator.ledger.check() == ()


ABSENT = 'the workload "{name}" needs the extra "hf", which is not installed here'
SHORT = 'memory was short: the batches of "{name}" could not be cut as they were'


def absent(name: str) -> Workload:
    """Load a workload where what it needs was taken away behind the claim."""
    raise NotFound(ABSENT.format(name=name))


async def declined(home: LocalCoordinator) -> list[str]:
    """Nicknames of those who gave the audit back."""

    def read(conn: Connection) -> list[str]:
        return decode(conn.execute(audited(recomputes.c.declined)).scalars().one(), list[str])

    found = await home.coordinator.db.read(read)
    return [p.nickname for p in await home.coordinator.volunteers.list() if p.volunteer_id in found]


def short_of_memory(name: str) -> Workload:
    """Load a workload on a machine that cannot cut the batches as the other did."""
    raise TooLarge(SHORT.format(name=name))


@pytest.mark.parametrize(
    ("load", "why"),
    [(absent, ABSENT), (short_of_memory, SHORT)],
    ids=["without the library", "short of memory"],
)
async def test_an_auditor_that_cannot_gives_the_task_back_and_blames_nobody(
    tmp_path: Path, database_url: str, load: Any, why: str
) -> None:
    async with done(tmp_path, KINDS[3], database_url) as (home, bob):
        carol = LocalMachine(tmp_path / "carol", home)
        await carol.join("Carol")
        await proven(home, "Carol")
        before = await balances(home, "Carol")
        async with carol.working(load) as process:
            assert (await process.until(events.Claimed)).kind == events.AUDIT
            ended = await process.until(events.TaskEnded)
        assert (ended.how, ended.message) == ("released", why.format(name="causal-lm"))
        assert await declined(home) == ["Carol"]
        await until(home, "waiting")
        assert await balances(home, "Carol") == before
        await agrees(home, bob, "causal-lm")


# A machine of the organiser's where an extra is not installed.
BARE = """
import sys
from coordinator.cli.main import main
from shared.workloads import base
base._has_extra = lambda package, extra: False
sys.exit(main())
"""


async def audit_work(url: str, token: Path) -> list[dict[str, Any]]:
    """Run `coordinator checker work` on such a machine; the lines that it tells."""
    words = ["checker", "work", "--once", "--device", "cpu", "--threads", "1", "--json"]
    words += ["--server", url, "--token-file", str(token)]
    said = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BARE, *words, stdout=PIPE, stderr=PIPE
    )
    out, errors = await said.communicate()
    assert said.returncode == 0, errors.decode()
    return [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]


@pytest.mark.slow
async def test_an_auditor_of_the_organisers_without_the_library_settles_nothing(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home, served(home) as url:
        await started(home, *KINDS[3], trust="[trust]\nrecompute = 1.0\n")
        await seen(home, "checker")
        async with home.coordinator.working():
            ann = LocalMachine(tmp_path / "ann", home)
            await ann.join("Ann")
            await worked(home, ann, "causal-lm")
            await states(home, {"waiting": 1})
        found = await audit_work(url, home.coordinator.settings.admin_token_file)
        assert {(each["result"], each["message"]) for each in found[:-1]} == {
            ("given back", ABSENT.format(name="causal-lm"))
        }
        assert (await balances(home, "Ann"))[0] == "vetted"
        assert await home.coordinator.recomputes.next()  # it is the server's by then
        assert await result(home) == "passed"
