"""Refusals of the intake: what is not stored, not paid, not drawn, and counted against nobody."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs

from coordinator.accounts.suspension import suspend
from coordinator.compute import Compute
from coordinator.database import volunteers as accounts
from coordinator.database.tables.accounts import volunteers
from coordinator.database.tables.contributions import contributions, verdicts
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import failures, tasks
from coordinator.database.tables.trust import recomputes
from coordinator.database.tables.versions import evaluations, heldout_sums
from coordinator.intake import intake
from coordinator.intake.intake import NEVER
from coordinator.rules import run_file, validation
from coordinator.rules.machine_time import MachineSeconds
from coordinator.rules.run_file import StopSettings, TrustSettings
from coordinator.rules.validation import COHORT_MIN, Measurement
from coordinator.storage.blobs import DamagedBlob, MissingBlob
from shared.errors import NotFound
from shared.protocol.accounts import Me
from shared.protocol.base import Reason
from shared.protocol.contributions import SubmitRequest, Verdict
from shared.protocol.leases import BeginReply, Lease
from shared.protocol.limits import API, PARTS_MAX, TRIES_MAX
from shared.protocol.members import HeldoutSums, MemberData
from tests.support.databases import Postgres
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)
from tests.support.members import declare
from tests.support.rollouts_run import RUN as ROLLOUTS

ALONE = RUN.replace("[plan]", "[plan]\noverlap = true").replace("quorum = 2", "quorum = 1000")
DRAWN = ALONE + "[trust]\nrecompute = 1.0\n"
MEMBERS = ALONE + '[data]\nat = "members"\n'
NAN = np.float32(np.nan).tobytes()


class Ready(NamedTuple):
    """Uploaded result, and its submission."""

    worker: Worker
    lease: Lease
    begun: BeginReply
    request: SubmitRequest

    async def submit(self, **changes: Any) -> Any:
        request = msgspec.structs.replace(self.request, **changes)
        return await self.worker.post(f"/tasks/{self.lease.task}/submit", request)

    async def verdict(self, **changes: Any) -> Verdict:
        return decode(await self.submit(**changes), Verdict)

    async def unchecked(self) -> None:
        """Submit to a server that dies before it looks at the result."""
        with faults(fail(RuntimeError("the process is gone")).after("write _receive")).installed():
            refused(await self.submit(), 500)


async def uploaded(
    worker: Worker, seed: int = 1, scale: float = 1e-3, *, broken: bool = False
) -> Ready:
    """Claim, begin and upload a task."""
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update(lease.run, seed, scale)
    data = data[:-4] + NAN if broken else data
    await worker.upload(lease, data)
    return Ready(worker, lease, begun, worker.submission(lease, begun, data))


async def read(home: LocalCoordinator, *columns: Any, **of: Any) -> list[Any]:
    """Rows of one table, oldest first; single values of one column."""
    query = sa.select(*columns).filter_by(**of).order_by(next(iter(columns[0].table.primary_key)))

    def rows(conn: sa.Connection) -> list[Any]:
        return [row[0] if len(columns) == 1 else tuple(row) for row in conn.execute(query)]

    return await home.coordinator.db.read(rows)


async def change(home: LocalCoordinator, table: sa.Table, **values: Any) -> None:
    await home.coordinator.db.write(lambda conn: conn.execute(sa.update(table).values(**values)))


async def pay(worker: Worker) -> tuple[int, int, int]:
    """Pending, staked and earned credit."""
    me = decode(await worker.get("/workers/me"), Me)
    return me.pending_micro, me.escrow_micro, me.earned_micro


async def outcome(home: LocalCoordinator) -> tuple[str, str]:
    """State and reason of the newest contribution, when the books balance."""
    assert await home.coordinator.ledger.check() == ()
    assert (await home.coordinator.checks.run()).breaches == ()
    c = contributions.c
    state, reason = (await read(home, c.state, c.reason))[-1]
    return state, reason


async def suspended(home: LocalCoordinator, worker: Worker) -> None:
    await home.coordinator.db.write(lambda c: suspend(c, worker.volunteer_id, "copies", 1.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"part": PARTS_MAX},
        {"tries": TRIES_MAX},
        {"part": 1},
        {"tries": 1},
        {"codec": "morse"},
        {"sha256": "0" * 64},
        {"size": 1},
    ],
)
async def test_what_cannot_be_a_result_is_not_stored_and_costs_nothing(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ready = await uploaded(await home.join("Ann"))
        assert (await ready.submit(**changes)).status_code in (400, 409)
        assert await read(home, contributions.c.id) == []
        assert await read(home, failures.c.id) == []
        assert (await ready.verdict()).state == "accepted"


async def test_the_bounds_of_parts_and_tries_are_named_before_the_task_is_looked_at(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ready = await uploaded(await home.join("Ann"))
        for name, limit in (("part", PARTS_MAX), ("tries", TRIES_MAX)):
            assert "out of range" in refused(await ready.submit(**{name: limit}), 400).message
            refused(await ready.submit(**{name: limit - 1}), 409)


async def test_an_update_in_a_codec_that_the_run_does_not_grant_is_refused(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        verdict = await ready.verdict(codec="int4")
        assert (verdict.state, verdict.reason) == ("rejected", Reason.FRAME)
        assert '"int4", which this run does not accept; accepted: bf16, float32, int8' in (
            verdict.message
        )
        assert await read(home, failures.c.kind) == ["failure"]
        assert await pay(ann) == (0, 0, 0)


async def test_a_result_whose_task_was_taken_back_is_not_counted_at_all(tmp_path: Path) -> None:
    """Its samples are somebody else's by now: neither merged, paid, drawn, nor a failure."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(DRAWN)
        ann, bob = await home.join("Ann"), await home.join("Bob")
        ready = await uploaded(ann)
        await ready.unchecked()
        await home.coordinator.runs.stop("tiny")
        await home.coordinator.wind_down.extend("tiny", StopSettings(versions=9), yes=True)
        theirs = await bob.claim()
        assert theirs.task == ready.lease.task
        before = await read(home, tasks.c.state, tasks.c.attempt, tasks.c.volunteer_id)
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("rejected", Reason.CANCELLED)
        assert await pay(ann) == (0, 0, 0)
        assert await read(home, recomputes.c.contribution_id) == []
        assert await read(home, failures.c.kind) == []
        assert await read(home, tasks.c.state, tasks.c.attempt, tasks.c.volunteer_id) == before
        assert (await bob.hand_in(theirs, await bob.begin(theirs), 2)).state == "accepted"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "input/output error"), MissingBlob("0" * 64)])
async def test_a_result_that_cannot_be_read_keeps_no_other_from_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        for seed, name in enumerate(("Ann", "Bob", "Cleo")):
            await (await uploaded(await home.join(name), seed)).unchecked()
        lost, local = (await read(home, contributions.c.sha256))[0], home.coordinator.blobs.local

        async def read_all_but_one(sha256: str) -> Path:
            if sha256 == lost:
                raise error
            return await local(sha256)

        monkeypatch.setattr(home.coordinator.blobs, "local", read_all_but_one)
        monkeypatch.setattr(intake, "RECHECK_MAX", 1)
        assert await home.coordinator.intake.recheck() == 3
        states = await read(home, contributions.c.state)
        assert states == ["checking", "accepted", "accepted"]


async def test_work_whose_run_ends_while_it_is_decided_is_paid_and_waits_for_no_merge(
    tmp_path: Path,
) -> None:
    """The run was read before another replica ended it, and its task after that."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        await ready.unchecked()
        await change(home, tasks, state="cancelled")
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("superseded", Reason.RUN_ENDED)
        assert await pay(ann) == (0, 0, ready.lease.price_micro)
        assert await read(home, tasks.c.state) == ["cancelled"]


async def test_work_of_an_account_that_was_suspended_meanwhile_is_neither_drawn_nor_paid(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(DRAWN)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        await ready.unchecked()
        await suspended(home, ann)
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("superseded", "")
        assert await pay(ann) == (0, 0, 0)
        assert await read(home, recomputes.c.contribution_id) == []
        assert await read(home, contributions.c.unproven) == [False]
        assert await read(home, tasks.c.state, id=ready.lease.task) == ["todo"]
        assert await read(home, volunteers.c.accepted) == [0]


async def test_work_of_an_account_that_was_banned_meanwhile_is_paid_and_not_merged(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        await ready.unchecked()
        await home.coordinator.volunteers.ban("Ann")
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("superseded", "")
        await home.coordinator.volunteers.unban("Ann")
        assert await pay(ann) == (0, 0, ready.lease.price_micro)
        assert await read(home, tasks.c.state, id=ready.lease.task) == ["todo"]
        assert await read(home, volunteers.c.accepted) == [0]


@pytest.mark.parametrize(("text", "state"), [(MEMBERS, "superseded"), (ALONE, "accepted")])
async def test_work_of_an_account_that_was_forgotten_meanwhile_waits_for_no_merge_of_members(
    tmp_path: Path, text: str, state: str
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(text)
        ann = await home.join("Ann")
        if text is MEMBERS:
            await declare(ann, 50)
        ready = await uploaded(ann)
        await ready.unchecked()
        await home.coordinator.volunteers.forget("Ann")
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == (state, "")
        messages = await read(home, verdicts.c.message)
        assert messages[-1].endswith("; the work is paid") == (state == "superseded")
        assert await home.coordinator.ledger.check() == ()


@pytest.mark.parametrize(
    ("exclusion", "paid"),
    [({"standing": "suspended"}, False), ({"state": "banned"}, True)],
    ids=str,
)
async def test_a_suspension_or_ban_that_comes_while_work_is_decided_keeps_it_out(
    tmp_path: Path,
    postgres: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    exclusion: dict[str, str],
    paid: bool,
) -> None:
    """Another process excludes the account after it was read, and before it is locked; SQLite has
    one writer.
    """
    url = await postgres.fresh()
    async with local_coordinator(tmp_path, database=url) as home:
        await home.start_run(DRAWN)
        ann = await home.join("Ann")
        ready, lock = await uploaded(ann), accounts.lock

        def and_meanwhile(conn: sa.Connection, ids: Collection[str]) -> None:
            conn.execute(sa.update(volunteers).values(exclusion))
            lock(conn, ids)

        monkeypatch.setattr(accounts, "lock", and_meanwhile)
        assert (await ready.verdict()).state == "superseded"
        assert await pay(ann) == (0, 0, ready.lease.price_micro if paid else 0)
        if not paid:
            assert await read(home, recomputes.c.contribution_id) == []
        assert await read(home, volunteers.c.accepted) == [0]
    await postgres.recycle(url)


async def test_bad_work_stays_bad_work_when_its_account_is_suspended(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann = await home.join("Ann")
        await (await uploaded(ann, broken=True)).unchecked()
        await suspended(home, ann)
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("rejected", Reason.NOT_FINITE)
        assert await read(home, failures.c.kind) == ["failure"]


async def test_work_of_a_run_that_ended_meanwhile_is_paid_and_kept_from_merges(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        await ready.unchecked()
        await home.coordinator.runs.stop("tiny")
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("superseded", Reason.RUN_ENDED)
        assert await pay(ann) == (0, 0, ready.lease.price_micro)
        assert await read(home, tasks.c.state, id=ready.lease.task) == ["cancelled"]


async def test_work_of_a_paused_run_is_accepted(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ready = await uploaded(await home.join("Ann"))
        await ready.unchecked()
        await home.coordinator.runs.pause("tiny")
        assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("accepted", "")


async def test_bytes_that_the_store_damaged_are_held_against_nobody(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(DRAWN)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        await ready.unchecked()

        async def damaged(sha256: str) -> Path:
            raise DamagedBlob(sha256)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(home.coordinator.blobs, "local", damaged)
            assert await home.coordinator.intake.recheck() == 1
        assert await outcome(home) == ("rejected", Reason.CANCELLED)
        assert await read(home, failures.c.id) == []
        assert await read(home, contributions.c.norm) == [None]
        assert await read(home, tasks.c.state, id=ready.lease.task) == ["todo"]
        assert await read(home, recomputes.c.contribution_id) == []


async def test_a_result_that_cannot_be_read_now_keeps_no_other_from_its_verdict(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        lost, good = [
            await uploaded(await home.join(name), n) for n, name in enumerate(("Ann", "Bob"))
        ]
        for ready in (lost, good):
            await ready.unchecked()
        await home.coordinator.blobs.delete(lost.request.sha256, "asked")
        with capture_logs() as lines:
            assert await home.coordinator.intake.recheck() == 2
        assert await read(home, contributions.c.state) == ["checking", "accepted"]
        (line,) = lines
        assert (line["event"], line["contribution"]) == ("check failed", 1)
        assert "is not in the store" in line["error"]


async def test_only_drawn_work_of_an_account_that_nobody_vouches_for_waits_for_its_proof(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as home:
        await home.start_run(DRAWN)
        ann, eve = await home.stranger("Ann"), await home.stranger("Eve")
        await home.coordinator.volunteers.vouch(ann.volunteer_id)
        bad = await uploaded(eve, broken=True)
        assert (await bad.verdict()).state == "rejected"
        assert await read(home, contributions.c.unproven) == [False]
        assert (await (await uploaded(ann, 1)).verdict()).state == "accepted"
        await (await uploaded(eve, 2)).verdict()
        c = contributions.c
        assert await read(home, c.volunteer_id, c.unproven) == [
            (eve.volunteer_id, False),
            (ann.volunteer_id, False),
            (eve.volunteer_id, True),
        ]


@pytest.mark.parametrize("vouched", [True, False])
async def test_work_that_no_machine_can_do_again_is_paid_only_to_whom_the_organiser_vouches_for(
    tmp_path: Path, vouched: bool
) -> None:
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as home:
        await home.start_run(DRAWN)
        worker = await home.stranger("Ann")
        if vouched:
            await home.coordinator.volunteers.vouch(worker.volunteer_id)
        ready = await uploaded(worker)
        await change(home, runs, dataset_id=None)
        verdict = await ready.verdict()
        assert verdict.state == "accepted"
        assert (NEVER in verdict.message) == (not vouched)
        assert sum(await pay(worker)) == (ready.lease.price_micro if vouched else 0)
        assert await read(home, recomputes.c.contribution_id) == []


async def test_draws_that_passed_stand_for_no_work_that_no_machine_can_do_again(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as home:
        await home.start_run(DRAWN)
        worker = await home.stranger("Ann")
        await change(home, volunteers, standing="vetted", proofs=12)
        ready = await uploaded(worker)
        await change(home, runs, dataset_id=None)
        verdict = await ready.verdict()
        assert (verdict.state, NEVER in verdict.message) == ("accepted", True)
        assert await pay(worker) == (0, 0, 0)


async def test_what_comes_after_an_open_draw_waits_for_its_proof_too(tmp_path: Path) -> None:
    """Else an account hides fakes behind a draw that it never has to pass."""
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=0) as home:
        await home.start_run(DRAWN)
        ann, eve = await home.stranger("Ann"), await home.stranger("Eve")
        await home.coordinator.volunteers.vouch(ann.volunteer_id)
        await (await uploaded(eve, 1)).verdict()
        file = run_file.decode((await read(home, runs.c.file))[0])
        seldom = msgspec.structs.replace(file, trust=TrustSettings(recompute=0.0))
        await change(home, runs, file=run_file.encode(seldom))
        await change(home, volunteers, draws=1000)
        for seed in range(2, 6):
            assert (await (await uploaded(eve, seed)).verdict()).state == "accepted"
        await (await uploaded(ann, 6)).verdict()
        assert len(await read(home, recomputes.c.contribution_id)) < 5  # not all were drawn
        c = contributions.c
        fay = await home.stranger("Fay")
        await change(home, volunteers, draws=1000)
        await (await uploaded(fay, 7)).verdict()
        drawn = await read(home, recomputes.c.contribution_id, volunteer_id=fay.volunteer_id)
        waits = await read(home, c.unproven, volunteer_id=fay.volunteer_id)
        assert waits == [bool(drawn)]  # behind no draw
        assert await read(home, c.unproven, volunteer_id=eve.volunteer_id) == [True] * 5
        assert await read(home, c.unproven, volunteer_id=ann.volunteer_id) == [False]


async def keeper(home: LocalCoordinator, name: str) -> Worker:
    """A member with data of its own."""
    worker = await home.join(name)
    body = msgspec.json.encode(MemberData(samples=64, items=512, heldout=1))
    assert (await worker.http.put(f"{API}/runs/tiny/data", content=body)).status_code == 204
    return worker


@pytest.mark.parametrize("private", [False, True])
async def test_updates_of_other_members_bound_no_update_of_a_private_run(
    tmp_path: Path, private: bool
) -> None:
    """A bound that follows from other members' updates would tell of their data."""
    async with local_coordinator(tmp_path) as home:
        terms = "[privacy]\nepsilon = 8.0\nclip = 1.0\n[stop]\nversions = 2\n"
        await home.start_run(MEMBERS + terms * private)
        for seed in range(COHORT_MIN):
            small = await uploaded(await keeper(home, f"Member {seed}"), seed, 2e-4)
            assert (await small.verdict()).state == "accepted"
        verdict = await (await uploaded(await keeper(home, "Zoe"), 99, 2e-3)).verdict()
        if private:
            assert verdict.state == "accepted"
            assert {*await read(home, contributions.c.clip)} == {1.0}
        else:
            assert (verdict.state, verdict.reason) == ("rejected", Reason.NORM)


async def test_a_loss_on_data_of_a_member_is_not_measured_by_the_organisers_example(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(MEMBERS)
        await change(home, evaluations, state="done", loss=0.01)
        ann = await keeper(home, "Ann")
        ready = await uploaded(ann)
        own = HeldoutSums(version=0, loss_sum=12.0, items=4)
        assert (await ready.verdict(heldout=own)).state == "accepted"
        h = heldout_sums.c
        sums = await read(home, h.run_id, h.version, h.worker_id, h.loss_sum)
        assert sums == [(1, 0, ann.worker_id, 12.0)]


async def test_nobody_reports_more_time_than_passed_or_another_base_than_its_lease(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        await home.clock.advance(5.0)
        assert (await ready.verdict(train_s=1e9)).state == "accepted"
        ready = await uploaded(ann, 2)
        verdict = await ready.verdict(train_s=-1e9, base_version=1)
        assert (verdict.state, verdict.reason) == ("rejected", Reason.STALE)
        c = contributions.c
        assert await read(home, c.train_s, c.base_version) == [(5.0, 0), (0.0, 0)]
        assert await read(home, failures.c.id) == []  # nothing is counted


async def test_a_part_names_no_newer_and_no_impossible_base(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        text = RUN.replace('preset = "fedavg"\nquorum = 2', 'preset = "async-sgd"')
        await home.start_run(text.replace("local_steps = 2", "local_steps = 4"))
        ann = await home.join("Ann")
        lease = await ann.claim()
        begun = await ann.begin(lease)
        for part, base in enumerate((9, -1)):
            wrong = msgspec.structs.replace(begun, version=base)
            verdict = await ann.part(lease, wrong, part)
            assert (verdict.state, verdict.reason) == ("rejected", Reason.STALE)
            lease = await ann.claim()
            begun = await ann.begin(lease)
            if part == 0:
                assert (await ann.part(lease, begun, 0)).state == "accepted"
        assert set(await read(home, contributions.c.base_version)) == {0}


async def test_a_figure_that_is_no_loss_bounds_no_reported_loss(tmp_path: Path) -> None:
    """Only where evaluations measure a loss is a much larger one refused."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        await home.coordinator.runs.create(ROLLOUTS)
        await home.coordinator.runs.start("rollouts")
        await home.coordinator.replay.tend(2)
        await change(home, evaluations, state="done", loss=0.01)
        ann, bob = await home.join("Ann"), await home.join("Bob", workloads=["rollouts"])
        verdict = await (await uploaded(ann)).verdict()
        assert (verdict.state, verdict.reason) == ("rejected", Reason.LOSS)
        assert (await (await uploaded(bob)).verdict()).state == "accepted"


async def test_a_warm_start_is_judged_by_its_own_rate_and_only_until_it_ends(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        text = ROLLOUTS.replace("warm_steps = 300", "warm_steps = 300\nwarm_lr = 1e-7")
        await home.coordinator.runs.create(text)
        await home.coordinator.runs.start("rollouts")
        await home.coordinator.replay.tend(1)
        ann = await home.join("Ann", workloads=["rollouts"])
        verdict = await (await uploaded(ann)).verdict()
        assert (verdict.state, verdict.reason) == ("rejected", Reason.NORM)
        assert "at lr 1e-07" in verdict.message
        ready = await uploaded(ann, 2, 5e-3)
        later = text.replace("warm_steps = 300", "warm_steps = 0")
        await change(home, runs, file=run_file.encode(run_file.parse(later)))
        assert (await ready.verdict()).state == "accepted"


async def test_a_repeated_submission_is_counted_once_and_told_what_became_of_it(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE.replace("quorum = 1000", "quorum = 2"))
        ann, bob = await home.join("Ann"), await home.join("Bob")
        first = await uploaded(ann, 1)
        verdicts = [await first.verdict() for _ in range(2)]
        assert [verdict.state for verdict in verdicts] == ["accepted", "accepted"]
        second = await uploaded(ann, 2)
        assert (await second.verdict()).contribution == verdicts[0].contribution + 1
        assert (await (await uploaded(bob, 3, broken=True)).verdict()).state == "rejected"
        assert home.coordinator.intake.decided == {
            ("tiny", "accepted", ""): 2,
            ("tiny", "rejected", Reason.NOT_FINITE): 1,
        }
        assert await home.coordinator.merger.merge_if_due(1)
        merged = await first.verdict()
        assert (merged.state, merged.contribution) == ("merged", verdicts[0].contribution)
        waiting = await uploaded(bob, 4)
        await waiting.unchecked()
        principal = await home.coordinator.volunteers.authenticate(bob.worker_id, bob.secret)
        standing = await home.coordinator.db.read(
            lambda conn: home.coordinator.intake.stands(conn, principal, 4)
        )
        assert (standing.state, standing.run, standing.redo) == ("checking", "tiny", False)
        assert (standing.task, standing.at) == (waiting.lease.task, home.clock.now())
        c = contributions.c
        assert (await read(home, c.clip, c.reason, c.message))[-1] == (1.0, "", "")


async def test_nobody_learns_or_changes_what_became_of_the_work_of_others(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann, bob = await home.join("Ann"), await home.join("Bob")
        ready = await uploaded(ann)
        verdict = await ready.verdict()
        assert refused(await ready._replace(worker=bob).submit(), 404).code == "unknown_task"
        assert refused(await ready.submit(loss_last=4.0), 409).code == "conflict"
        assert decode(await bob.get("/contributions"), tuple[Verdict, ...]) == ()
        principal = await home.coordinator.volunteers.authenticate(bob.worker_id, bob.secret)
        with pytest.raises(NotFound):
            await home.coordinator.db.read(
                lambda conn: home.coordinator.intake.stands(conn, principal, verdict.contribution)
            )


async def test_a_page_of_verdicts_has_so_many_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "HISTORY_PAGE", 2)
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann = await home.join("Ann")
        for seed in range(3):
            await (await uploaded(ann, seed)).verdict()
        principal = await home.coordinator.volunteers.authenticate(ann.worker_id, ann.secret)
        history = home.coordinator.intake.history
        numbers: list[int] = []
        while page := await history(principal, numbers[-1] if numbers else None):
            assert len(page) <= 2
            numbers += [number for number, _ in page]
        assert len(numbers) == 3
        assert numbers == sorted(numbers, reverse=True)


async def test_a_gradient_too_old_for_a_run_that_computes_nothing_again_is_given_up(
    tmp_path: Path,
) -> None:
    """Its lease may not submit once more, and its samples go to somebody else: nobody is blamed."""
    async with local_coordinator(tmp_path) as home:
        text = RUN.replace(
            'preset = "fedavg"\nquorum = 2', 'preset = "async-sgd"\nmax_staleness = 1'
        )
        await home.start_run(text.replace("local_steps = 2", "local_steps = 4"))
        ann, bob = await home.join("Ann"), await home.join("Bob")
        lease, other = await ann.claim(), await bob.claim()
        begun, theirs = await ann.begin(lease), await bob.begin(other)
        assert (lease.redo, begun.version) == (False, 0)
        for part in range(2):
            assert (await bob.part(other, theirs, part)).state == "accepted"
            assert await home.coordinator.merger.merge_if_due(1)
        late = await ann.part(lease, begun, 0)
        assert (late.state, late.reason, late.redo) == ("rejected", Reason.STALE, False)
        assert await read(home, tasks.c.state, id=lease.task) == ["todo"]
        assert await read(home, failures.c.id) == []
        refused(await ann.announce(lease, b"x", part=0, tries=1), 410)


async def test_a_gradient_that_a_merge_overtakes_while_it_is_checked_is_computed_again(
    tmp_path: Path,
) -> None:
    """The lease goes on from the newer version, and nobody is blamed."""
    async with local_coordinator(tmp_path) as home:
        text = RUN.replace('preset = "fedavg"\nquorum = 2', 'preset = "sync-sgd"\nquorum = 1')
        await home.start_run(text)
        ann, bob = await home.join("Ann"), await home.join("Bob")
        lease, other = await ann.claim(), await bob.claim()
        begun, theirs = await ann.begin(lease), await bob.begin(other)
        dead = faults(fail(RuntimeError("the process is gone")).after("write _receive"))
        with dead.installed(), pytest.raises(AssertionError, match="internal"):
            await ann.part(lease, begun, 0)
        assert (await bob.part(other, theirs, 0)).state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)
        assert await home.coordinator.intake.recheck() == 1
        late = await ann.verdict(1)
        assert (late.state, late.reason) == ("rejected", Reason.STALE)
        assert "version 1 was merged meanwhile: compute it once more" in late.message
        assert await read(home, tasks.c.state, id=lease.task) == ["doing"]
        assert await read(home, failures.c.id) == []
        again = await ann.newest(lease, begun.version)
        assert (again.version, again.part, again.tries) == (1, 0, 1)
        assert (await ann.part(lease, again, 0, tries=1)).state == "accepted"


async def test_who_waits_for_updates_or_for_work_hears_of_a_verdict_and_of_no_repeat(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(DRAWN)
        ann = await home.join("Ann")
        ready = await uploaded(ann)
        topics = ("contributions", "queue", "recomputes")
        watches = [home.coordinator.signals.watch(topic) for topic in topics]
        for heard in (True, False):
            assert (await ready.verdict()).state == "accepted"
            assert [await watch.wait(0) for watch in watches] == [heard] * 3
        assert home.coordinator.attendance.drain() == {1: MachineSeconds(trained=0.0)}
        ready = await uploaded(ann, 2)
        await home.clock.advance(5.0)
        for _ in range(2):
            assert (await ready.verdict(train_s=4.0)).state == "accepted"
        assert home.coordinator.attendance.drain() == {1: MachineSeconds(trained=4.0)}


async def test_work_whose_sender_hangs_up_is_checked_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other requests wait for the same check."""
    looked, left, measure = threading.Event(), threading.Event(), validation.measure

    def while_it_hangs_up(*update: Any) -> Measurement:
        looked.set()
        assert left.wait(60)
        return measure(*update)

    monkeypatch.setattr(validation, "measure", while_it_hangs_up)
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ready = await uploaded(await home.join("Ann"))
        watch = home.coordinator.signals.watch("contributions")
        sender = asyncio.ensure_future(ready.submit())
        assert await asyncio.to_thread(looked.wait, 60)
        sender.cancel()
        with suppress(asyncio.CancelledError):
            await sender
        left.set()
        async with asyncio.timeout(30):
            assert await watch.wait(1)
        assert await read(home, contributions.c.state) == ["accepted"]


async def test_games_wait_on_a_server_that_cannot_play_them_for_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither refused nor paid there; the time of their machine is well spent by then."""
    async with local_coordinator(tmp_path) as home:
        await home.coordinator.runs.create(ROLLOUTS.replace("warm_steps = 300", "warm_steps = 0"))
        await home.coordinator.runs.start("rollouts")
        await home.coordinator.replay.tend(1)
        ann = await home.join("Ann", workloads=["rollouts"])
        lease = await ann.claim()
        begun = await ann.begin(lease)
        data = b"games"
        await ann.upload(lease, data)
        monkeypatch.setattr(Compute, "possible", staticmethod(lambda: False))
        await home.clock.advance(5.0)
        said = ann.submission(lease, begun, data)
        verdict = await Ready(ann, lease, begun, said).verdict()
        assert verdict.state == "checking"
        assert await pay(ann) == (0, 0, 0)
        c = contributions.c
        assert await read(home, c.kind, c.state) == [("experience", "checking")]
        time = MachineSeconds(trained=1.0, merged=1.0)
        assert home.coordinator.attendance.drain() == {1: time}


async def test_accounts_are_decided_together_and_the_machines_of_one_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draw depends on what was decided before of its account, and of no other."""
    async with local_coordinator(tmp_path) as home:
        await home.start_run(ALONE)
        ann, bob, cleo, dan = [await home.join(name) for name in ("Ann", "Bob", "Cleo", "Dan")]
        people, db = home.coordinator.volunteers, home.coordinator.db
        code = (await people.link_code(await people.authenticate(bob.worker_id, bob.secret))).code
        crew = [dan, ann, bob, await home.join("", code=code), cleo]
        work = [await uploaded(worker, seed) for seed, worker in enumerate(crew)]
        write, decisions = db.write, list[int]()
        first, others = asyncio.Event(), asyncio.Event()

        async def counted(transaction: Any) -> Any:
            """Hold the first decision until every other has been asked for."""
            if "_decide" not in transaction.__code__.co_names:
                return await write(transaction)
            first.set()
            await others.wait()
            before = len(await read(home, verdicts.c.id))
            result = await write(transaction)
            decisions.append(len(await read(home, verdicts.c.id)) - before)
            return result

        monkeypatch.setattr(db, "write", counted)
        replies = [asyncio.ensure_future(work[0].verdict())]
        async with asyncio.timeout(60):
            await first.wait()
            replies += [asyncio.ensure_future(ready.verdict()) for ready in work[1:]]
            while len(home.coordinator.intake._deciding[1]._waiting) < len(work) - 1:
                await asyncio.sleep(0.001)
            others.set()
            verdicts_told = await asyncio.gather(*replies)
        assert {verdict.state for verdict in verdicts_told} == {"accepted"}
        assert decisions == [1, 3, 1]
