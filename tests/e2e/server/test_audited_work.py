"""Audits of all kinds of work: what goes on from a state and a residual, what ships gradients, and
pictures. Real volunteers and a real server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, select

from coordinator.database.auditing.audits import Work
from coordinator.database.tables.trust import audits
from coordinator.rules import audits as rules
from shared.decoding import decode
from tests.e2e.server.test_audits import (
    audited,
    escrow,
    every_lot_is_up,
    proven,
    result,
    until,
)
from tests.e2e.server.test_forward_checks import flipped
from tests.e2e.server.test_recomputes import balances, run_file, short
from tests.e2e.workloads.test_dcgan import PRESETS, RUN, copied
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine

AUDITED = "[trust]\naudit = 1.0\n"


async def started(home: LocalCoordinator, workload: str, preset: str, codec: str) -> None:
    """Start a run whose work is audited."""
    if workload == "gpt":
        await home.start_run(run_file(codec, preset).replace("recompute = 1.0", "audit = 1.0"))
        return
    await home.coordinator.datasets.add(copied)
    text = RUN.replace("[plan]\n", "[plan]\n" + PRESETS[preset]).replace("int8", codec)
    await home.coordinator.runs.create(text + AUDITED)
    await home.coordinator.runs.start("digits")


@pytest.fixture(autouse=True)
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing done again by the organiser but what differs."""
    monkeypatch.setattr(rules, "confirmed_chance", lambda passed: 0.0)


@asynccontextmanager
async def done(
    path: Path, of: tuple[str, str, str], database: str = "", load: Any = None
) -> AsyncIterator[tuple[LocalCoordinator, LocalMachine]]:
    """A coordinator where Ann did two tasks, of whom the second is to be audited, for there was
    nobody who could before; and Bob, who may.
    """
    async with local_coordinator(path / "coordinator", database=database) as home:
        await started(home, *of)
        ann, bob = LocalMachine(path / "ann", home), LocalMachine(path / "bob", home)
        await ann.join("Ann")
        async with home.coordinator.working():
            async with ann.working(max_tasks=1) as process:
                assert await process.ended(120) == 0
            await bob.join("Bob")
            await proven(home, "Bob")
            async with ann.working(load, max_tasks=1) as process:  # from files alone
                assert await process.ended(120) == 0
                await until(home, "open")
            await every_lot_is_up(home)
            yield home, bob


async def lent(home: LocalCoordinator) -> Work:
    """The lease of the audit, as it is stored."""

    def read(conn: Connection) -> str:
        return str(conn.execute(select(audits.c.work)).scalar_one())

    return decode(await home.coordinator.db.read(read), Work)


KINDS = [
    ("gpt", "fedavg", "topk-int4"),
    ("gpt", "sync-sgd", "int8"),
    ("dcgan", "gradient-average", "int8"),
]


async def agrees(home: LocalCoordinator, bob: LocalMachine) -> None:
    await audited(bob)
    await until(home, "done")
    assert await result(home) == "passed"
    assert await escrow(home, "Bob") > 0
    assert (await balances(home, "Ann"))[0] == "vetted"
    assert await home.coordinator.ledger.check() == ()


async def test_work_that_goes_on_from_a_state_and_a_residual_is_audited(
    tmp_path: Path, database_url: str
) -> None:
    async with done(tmp_path, ("gpt", "fedavg", "int8"), database_url) as (home, bob):
        work = await lent(home)
        assert work.audit.inner is not None
        await agrees(home, bob)


@pytest.mark.parametrize("of", KINDS)
async def test_an_audit_of_any_kind_of_work_agrees_with_what_is_honest(
    tmp_path: Path, of: tuple[str, str, str]
) -> None:
    async with done(tmp_path, of) as (home, bob):
        work = await lent(home)
        assert (work.audit.inner is None) == (of[1] != "fedavg")
        await agrees(home, bob)


@pytest.mark.parametrize("of", [KINDS[1], ("dcgan", "fedavg", "int8")])
async def test_an_audit_of_any_kind_of_work_finds_what_was_made_up(
    tmp_path: Path, of: tuple[str, str, str]
) -> None:
    async with done(tmp_path, of, load=flipped) as (home, bob):
        await audited(bob)
        assert await until(home, "done") == "passed"
        assert await result(home) == "failed"
        assert (await balances(home, "Ann"))[0] == "suspended"
        assert (await balances(home, "Bob"))[0] == "vetted"
        assert await home.coordinator.ledger.check() == ()


async def test_an_audit_of_pictures_cuts_the_batches_as_the_machine_did(tmp_path: Path) -> None:
    async with done(tmp_path, ("dcgan", "fedavg", "int8"), load=short) as (home, bob):
        assert (await lent(home)).job.halved
        await agrees(home, bob)
