"""Versions made with the work of accounts that were suspended since: a way back is proposed."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, event, insert, update

from coordinator.admin import runs as admin
from coordinator.admin.command import NameRequest
from coordinator.cli.runs import _healed
from coordinator.cli.target import HERE
from coordinator.database import runs, versions
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.versions import evaluations
from coordinator.database.versions import VersionRow
from coordinator.merging import rollback_proposal
from coordinator.merging.rollback_proposal import Proposal
from tests.support.local_coordinator import RUN, LocalCoordinator, Worker, local_coordinator
from tests.support.run_rows import add_run, add_version, add_versions

REASON = "a recompute of its work failed"


async def version(home: LocalCoordinator, *workers: Worker, seed: int) -> None:
    """One more version, of a task of each."""
    leases = [await worker.claim() for worker in workers]
    begun = [await worker.begin(lease) for worker, lease in zip(workers, leases, strict=True)]
    for number, worker in enumerate(workers):
        lease, base = leases[number], begun[number]
        assert (await worker.hand_in(lease, base, seed + number)).state == "accepted"
    assert await home.coordinator.merger.merge_if_due(1)


async def row(home: LocalCoordinator, number: int) -> VersionRow:
    return await home.coordinator.db.read(lambda conn: versions.get(conn, 1, number))


async def spoilt(home: LocalCoordinator) -> str:
    """Three versions of which the second has work of Eve in it, who is suspended then."""
    run = await home.start_run(RUN)
    ann, ben, cat = [await home.join(name) for name in ("Ann", "Ben", "Cat")]
    eve = await home.join("Eve")
    await version(home, ann, ben, cat, seed=1)
    await version(home, eve, ann, ben, seed=10)
    await version(home, ann, ben, cat, seed=20)
    await home.coordinator.volunteers.suspend("Eve", REASON)
    return run


async def proposed(home: LocalCoordinator, run: str) -> Proposal | None:
    shown: admin.RunShown = await admin.show.run(home.coordinator, NameRequest(name=run))
    return shown.heal


async def test_the_organiser_is_shown_the_one_command(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await spoilt(home)
        found = await proposed(home, run)
        assert found is not None
        assert (found.version, found.to) == (2, 1)
        assert 0.3 < found.share < 0.4
        assert "`coordinator run rollback tiny --to 1`" in _healed(found, HERE)
        look = home.coordinator.alerts.look
        (told,) = [alert for alert in await look() if alert.kind == "rollback"]
        assert (told.state, told.about) == ("on", "tiny@2")
        assert "of tiny@2 came from accounts suspended since" in told.message
        assert "`coordinator run rollback tiny --to 1`" in told.message
        info = await home.coordinator.runs.rollback(run, found.to)
        assert info.version == 4
        assert (await row(home, 4)).master_sha256 == (await row(home, 1)).master_sha256
        assert await proposed(home, run) is None  # what was left behind asks for nothing
        assert [alert.state for alert in await look() if alert.kind == "rollback"] == ["over"]


async def test_the_way_back_leads_before_every_spoilt_version(tmp_path: Path) -> None:
    """A rollback to the newest spoilt version's base would keep the older ones."""
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await home.start_run(RUN)
        ann, ben, cat, eve = [await home.join(name) for name in ("Ann", "Ben", "Cat", "Eve")]
        await version(home, ann, ben, cat, seed=1)
        await version(home, eve, ann, ben, seed=10)
        await version(home, ann, ben, cat, seed=20)
        await version(home, eve, ben, cat, seed=30)
        await home.coordinator.volunteers.suspend("Eve", REASON)
        proposal = await proposed(home, run)
        assert proposal is not None
        assert (proposal.version, proposal.to) == (2, 1)


async def test_an_account_that_merged_nothing_spoils_no_version(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await home.start_run(RUN)
        ann, ben, cat = [await home.join(name) for name in ("Ann", "Ben", "Cat")]
        await home.join("Eve")
        await version(home, ann, ben, cat, seed=1)
        await home.coordinator.volunteers.suspend("Eve", REASON)
        assert await proposed(home, run) is None


async def test_a_way_back_passes_over_a_version_whose_files_are_gone(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await spoilt(home)
        gone = update(evaluations).where(evaluations.c.version == 1).values(pruned=True)
        await home.coordinator.db.write(lambda conn: conn.execute(gone))
        proposal = await proposed(home, run)
        assert proposal is not None
        assert (proposal.version, proposal.to) == (2, 0)


async def test_a_way_back_leads_to_a_version_that_has_its_files(tmp_path: Path) -> None:
    """However many in a row have lost theirs."""
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await home.start_run(RUN)
        ann, ben, cat, eve = [await home.join(name) for name in ("Ann", "Ben", "Cat", "Eve")]
        for seed in (1, 10):
            await version(home, ann, ben, cat, seed=seed)
        await version(home, eve, ann, ben, seed=20)
        await home.coordinator.volunteers.suspend("Eve", REASON)
        gone = update(evaluations).where(evaluations.c.version.in_((1, 2))).values(pruned=True)
        await home.coordinator.db.write(lambda conn: conn.execute(gone))
        proposal = await proposed(home, run)
        assert proposal is not None
        assert (proposal.version, proposal.to) == (3, 0)


async def test_a_look_at_a_long_run_takes_few_statements(database: Database) -> None:
    def look(conn: Connection) -> list[str]:
        run = add_run(conn)
        add_versions(conn, run, 3 * rollback_proposal.RECENT)
        add_version(conn, run, 61, kind="rollback")
        text = dict.fromkeys(("sample", "message"), "")
        blank = {"run_id": run, "state": "skipped", "metrics": "{}", "pruned": False, **text}
        conn.execute(insert(evaluations), [blank | {"version": n} for n in range(62)])
        seen: list[str] = []
        event.listen(conn, "before_cursor_execute", lambda *said: seen.append(str(said[2])))
        assert rollback_proposal.proposal(conn, runs.by_id(conn, run)) is None
        return seen

    assert len(await database.write(look)) <= 5


async def test_a_small_share_is_let_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback_proposal, "SHARE", 0.4)
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await spoilt(home)
        assert await proposed(home, run) is None


async def test_what_was_taken_back_counts_like_a_suspension(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        run = await home.start_run(RUN)
        ann, ben, eve = [await home.join(name) for name in ("Ann", "Ben", "Eve")]
        await version(home, ann, ben, eve, seed=1)
        assert await proposed(home, run) is None
        await home.coordinator.volunteers.reversals.of_volunteer("Eve", 0.0, "made up")
        found = await proposed(home, run)
        assert found is not None
        assert (found.version, found.to) == (1, 0)
