"""A run on data that its members keep: numbers come in, tasks go to their own machines alone, and
nothing of it is ever done again by others.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from coordinator.checking.case import Case, Draws
from coordinator.database import contributions, merges, runs
from coordinator.database.contributions import ContributionRow
from coordinator.database.ledger import payments
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.merges import merges as merges_table
from coordinator.database.tables.trust import recomputes
from coordinator.database.tables.versions import heldout_sums
from coordinator.merging import merge_recipe as recipes
from coordinator.merging.merge_recipe import MergeRecipe
from coordinator.runs.member_figures import MemberFigures, MemberLoss, figures
from shared.errors import InvalidRunFile
from shared.protocol.accounts import LinkCode, Me, RegisterReply, RunInfo
from shared.protocol.base import Reason
from shared.protocol.contributions import Verdict
from shared.protocol.leases import ClaimReply
from shared.protocol.limits import API
from shared.protocol.members import HeldoutSums, MemberData
from shared.units import HOUR_S
from tests.support.command_line import Run
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
    refused,
)
from tests.support.members import contribute, declare

TEXT = f"""{RUN}
[data]
at = "members"
"""


async def idle(worker: Worker) -> tuple[Reason, str]:
    body = {"claim_id": "once", "wait_s": 0, "codecs": ["float32"]}
    reply = decode(await worker.post("/claims", body), ClaimReply)
    assert reply.idle is not None
    return reply.idle.reason, reply.idle.message


def sums(loss: float, version: int = 0, items: int = 100) -> HeldoutSums:
    return HeldoutSums(version=version, loss_sum=loss * items, items=items)


async def shown(home: LocalCoordinator) -> MemberFigures:
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    found = await home.coordinator.db.read(lambda conn: figures(conn, row))
    assert found is not None
    return found


async def merge(home: LocalCoordinator) -> None:
    run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    assert await home.coordinator.merger.merge_if_due(run.id)


async def test_members_declare_train_and_measure_on_their_own_data(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT)
        ann, ben = await home.join("Ann"), await home.join("Ben")
        info = decode(await ann.get("/runs/tiny"), RunInfo)
        form = info.members
        assert form is not None
        assert (form.dataset, form.kind, form.heldout_share) == ("sums", "tokens", 0.1)
        assert (form.train.init_from, form.batch_size) == ("", 2)
        reason, message = await idle(ann)
        assert reason == Reason.NO_FIT
        assert "volunteer data add tiny PATH" in message
        await declare(ann, 10)
        await declare(ben, 90)
        mine = await contribute(ann, 1, sums(2.0))
        assert (mine.member, mine.dataset, mine.chunks) == (True, "sums", ())
        assert (mine.job.start, mine.job.stop) == (0, 4)
        others = await contribute(ben, 2, sums(4.0))
        assert (others.job.start, others.job.stop) == (0, 4)
        assert mine.job.order_seed != others.job.order_seed
        assert mine.job.seed != others.job.seed
        found = await shown(home)
        assert (found.members, found.machines, found.samples, found.items) == (2, 2, 100, 800)
        assert found.newest == MemberLoss(version=0, members=2, mean=3.0, worst=4.0, spread=1.0)
        await home.coordinator.volunteers.ban("Ben")
        found = await shown(home)
        assert (found.members, found.samples) == (1, 10)  # nor do its losses choose a version
        assert found.newest == MemberLoss(version=0, members=1, mean=2.0, worst=2.0, spread=0.0)
        await merge(home)
        again = await ann.claim()
        assert (again.job.start, again.job.order_seed) == (4, mine.job.order_seed)


async def test_the_best_version_is_the_one_that_members_measure_best(tmp_path: Path) -> None:
    losses = [(3.0, 3.0), (1.0, 4.0), (2.4, 2.4)]  # by mean version 2 of these, by worst too
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT.replace('"members"', '"members"\nbest = "worst"'))
        ann, ben = await home.join("Ann"), await home.join("Ben")
        await declare(ann, 50)
        await declare(ben, 50)
        for version, (first, second) in enumerate(losses):
            await contribute(ann, 2 * version, sums(first, version))
            await contribute(ben, 2 * version + 1, sums(second, version))
            await merge(home)
        await home.coordinator.evaluation.evaluate_next()
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert row.best == 2
        assert (await shown(home)).best == MemberLoss(
            version=2, members=2, mean=2.4, worst=2.4, spread=0.0
        )


MIXED = TEXT.replace("quorum = 2", "quorum = 3\nmin_contributions = 2\ndeadline_seconds = 60")
OVERLAP = MIXED.replace("quorum = 3", "quorum = 3\noverlap = true")


async def state_of(home: LocalCoordinator) -> tuple[int, list[str]]:
    """Return the newest version, and the states of the updates in order."""
    table = contributions_table.c
    row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    states = sa.select(table.state).order_by(table.id)
    return row.head, list(
        await home.coordinator.db.read(lambda conn: conn.execute(states).scalars().all())
    )


@pytest.mark.parametrize("text", [MIXED, OVERLAP], ids=["in step", "overlap"])
async def test_a_lone_member_makes_no_version_and_is_asked_for_no_second_task(
    tmp_path: Path, text: str, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(text)
        ann = await home.join("Ann")
        await declare(ann, 50)
        lease = await ann.claim()
        assert (await idle(ann))[0] == Reason.IN_FLIGHT  # none in advance either
        assert (await ann.hand_in(lease, await ann.begin(lease), 1)).state == "accepted"
        info = decode(await ann.get("/runs/tiny"), RunInfo)
        assert info.merging == "merging after 1 more contribution, 1 of another member"
        for _ in range(3):
            await home.clock.advance(HOUR_S)  # long after the deadline; nobody else is here
            row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
            assert not await home.coordinator.merger.merge_if_due(row.id)
        assert await idle(ann) == (
            Reason.IN_FLIGHT,
            'your update of "tiny" waits to be mixed with those of 1 other member: then this '
            "machine gets its next task",
        )
        assert await state_of(home) == (0, ["accepted"])
        ben = await home.join("Ben")
        await declare(ben, 50)
        await contribute(ben, 2)
        await merge(home)
        assert await state_of(home) == (1, ["merged", "merged"])
        assert (await ann.claim()).job.start == 4


async def test_a_member_that_waits_for_others_is_woken_by_the_last_of_them_alone(
    tmp_path: Path,
) -> None:
    text = OVERLAP.replace("min_contributions = 2", "min_contributions = 3")
    async with local_coordinator(tmp_path) as home:
        await home.start_run(text.replace("quorum = 3", "quorum = 4"))
        ann, ben, cid, dan = [await home.join(name) for name in ("Ann", "Ben", "Cid", "Dan")]
        for worker in (ann, ben, cid, dan):
            await declare(worker, 50)
        leases = [await worker.claim() for worker in (ben, cid, dan)]
        await contribute(ann, 1)
        looks = home.coordinator.task_leases.claims.durations
        before = looks.count
        waiting = asyncio.create_task(ann.claim(wait_s=20.0))  # no clock moves
        async with asyncio.timeout(30):
            while looks.count == before:
                await asyncio.sleep(0.01)
            await ben.hand_in(leases[0], await ben.begin(leases[0]), 2)
            before = looks.count
            home.coordinator.signals.notify("queue")
            await shown(home)  # time for a look
            assert looks.count == before
            assert not waiting.done()
            await cid.hand_in(leases[1], await cid.begin(leases[1]), 3)
            assert (await waiting).job.start == 4
        assert await state_of(home) == (0, ["accepted"] * 3)


async def test_two_machines_of_a_member_are_one_member(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(MIXED)
        ann = await home.join("Ann")
        other = Worker(home, "Ann")
        other.volunteer_id, other.secret = ann.volunteer_id, ann.secret
        other.http = home.client(f"{other.worker_id}.{other.secret}")
        code = decode(await ann.post("/links"), LinkCode).code
        decode(await other.post("/workers/register", other.registration(code=code)), RegisterReply)
        leases = []
        for machine in (ann, other):
            await declare(machine, 50)
            leases.append(await machine.claim())
        for machine, lease in zip((ann, other), leases, strict=True):
            await machine.hand_in(lease, await machine.begin(lease), lease.task)
        await home.clock.advance(HOUR_S)
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert not await home.coordinator.merger.merge_if_due(row.id)
        assert await state_of(home) == (0, ["accepted", "accepted"])
        for machine in (ann, other):
            assert "1 other member" in (await idle(machine))[1]
        ben = await home.join("Ben")
        await declare(ben, 50)
        await contribute(ben, 3)
        await merge(home)
        assert await state_of(home) == (1, ["merged"] * 3)


async def test_of_three_members_one_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(MIXED)
        ann, ben, cid = [await home.join(name) for name in ("Ann", "Ben", "Cid")]
        for worker in (ann, ben, cid):
            await declare(worker, 50)
        left = await cid.claim()
        await cid.begin(left)
        await contribute(ann, 1)
        await contribute(ben, 2)
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert not await home.coordinator.merger.merge_if_due(row.id)  # Cid is still at work
        await home.clock.advance(61)
        await merge(home)
        assert await state_of(home) == (1, ["merged", "merged"])
        await home.coordinator.volunteers.ban("Cid")
        await home.clock.advance(HOUR_S)
        await home.coordinator.task_leases.expire()
        await contribute(ann, 3)
        assert not await home.coordinator.merger.merge_if_due(row.id)
        await contribute(ben, 4)
        await merge(home)
        assert await state_of(home) == (2, ["merged"] * 4)


async def test_an_update_that_never_found_company_is_paid_and_in_no_version(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(MIXED)
        ann = await home.join("Ann")
        await declare(ann, 50)
        lease = await contribute(ann, 1)
        await home.coordinator.runs.stop("tiny")
        assert await state_of(home) == (0, ["superseded"])
        verdict = decode(await ann.get("/contributions"), tuple[Verdict, ...])[0]
        assert verdict.message == "the run ended before the next merge; the work is paid"
        me = decode(await ann.get("/workers/me"), Me)
        assert (me.earned_micro, me.merged) == (lease.price_micro, 0)


async def test_a_member_suspended_between_acceptance_and_merge_is_no_company(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(MIXED)
        ann, ben = await home.join("Ann"), await home.join("Ben")
        for seed, worker in enumerate((ann, ben)):
            await declare(worker, 50)
            await contribute(worker, seed)
        await home.coordinator.volunteers.suspend("Ben", "copies of others")
        await home.clock.advance(HOUR_S)
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert not await home.coordinator.merger.merge_if_due(row.id)
        assert await state_of(home) == (0, ["accepted", "superseded"])
        assert "1 other member" in (await idle(ann))[1]


async def test_who_forgets_the_account_and_joins_again_is_no_company(
    tmp_path: Path, database_url: str
) -> None:
    async with local_coordinator(tmp_path, database=database_url) as home:
        await home.start_run(MIXED)
        ann = await home.join("Ann")
        await declare(ann, 50)
        lease = await contribute(ann, 1)
        assert (await ann.post("/workers/leave", {"forget": True})).status_code == 204
        again = await home.join("Ann2")
        await declare(again, 50)
        await contribute(again, 2)
        await home.clock.advance(HOUR_S)
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert not await home.coordinator.merger.merge_if_due(row.id)
        assert await state_of(home) == (0, ["superseded", "accepted"])
        assert "1 other member" in (await idle(again))[1]
        pay = await home.coordinator.db.read(
            partial(payments.balances, volunteer_id=ann.volunteer_id)
        )
        assert (pay.earned_micro, pay.pending_micro) == (lease.price_micro, 0)
        assert await home.coordinator.ledger.check() == ()
        ben = await home.join("Ben")
        await declare(ben, 50)
        await contribute(ben, 3)
        await merge(home)
        assert await state_of(home) == (1, ["superseded", "merged", "merged"])


async def test_other_data_begin_a_new_pass_and_the_same_none(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT)
        ann = await home.join("Ann")
        await declare(ann, 10)
        first = await ann.claim()
        await ann.post(f"/tasks/{first.task}/release", {"attempt": first.attempt})
        await declare(ann, 10)
        again = await ann.claim()
        assert (again.task, again.job.order_seed) == (first.task, first.job.order_seed)
        await ann.post(f"/tasks/{again.task}/release", {"attempt": again.attempt})
        await declare(ann, 11)
        other = await ann.claim()
        assert (other.job.start, other.task != first.task) == (0, True)
        assert other.job.order_seed != first.job.order_seed
        await ann.post(f"/tasks/{other.task}/release", {"attempt": other.attempt})
        await declare(ann, 11, edition="other files, as many")
        another = await ann.claim()
        assert (another.job.start, another.task != other.task) == (0, True)
        assert another.job.order_seed != other.job.order_seed
        reply = await ann.http.delete(f"{API}/runs/tiny/data")
        assert reply.status_code == 204
        assert (await idle(ann))[0] == Reason.NO_FIT
        assert (await shown(home)).members == 0


async def test_a_member_away_for_a_day_is_missed_by_none_and_does_its_own_work_afterwards(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT)
        ann, ben, cid = [await home.join(name) for name in ("Ann", "Ben", "Cid")]
        for worker in (ann, ben, cid):
            await declare(worker, 64)
        left = await ann.claim()
        await ann.begin(left)
        orders = {left.job.order_seed}
        for version in range(3):
            for at, worker in enumerate((ben, cid)):
                others = await contribute(worker, 10 * version + at)
                assert others.task != left.task
                orders.add(others.job.order_seed)
            await merge(home)
            await home.clock.advance(8 * HOUR_S)
            await home.coordinator.task_leases.expire()
        assert len(orders) == 3  # each has gone through its own data alone
        again = await ann.claim()
        assert (again.task, again.attempt) == (left.task, left.attempt + 1)
        assert (again.job.start, again.job.order_seed) == (left.job.start, left.job.order_seed)
        verdict = await ann.hand_in(again, await ann.begin(again), seed=99)
        assert verdict.state == "accepted"
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert (row.state, row.head) == ("running", 3)


async def test_a_merge_weighs_members_by_samples_and_none_above_twice_its_share(
    tmp_path: Path,
) -> None:
    sizes = {"Ann": 900, "Ben": 1, "Cid": 33, "Dan": 33, "Eve": 33}
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT.replace("quorum = 2", "quorum = 6\noverlap = true"))
        for seed, (name, samples) in enumerate(sizes.items()):
            worker = await home.join(name)
            await declare(worker, samples)
            await contribute(worker, seed)
            if name == "Ann":
                await contribute(worker, 77)  # two updates of a member are one member
                await worker.http.delete(f"{API}/runs/tiny/data")  # its work still counts
        await merge(home)
        recipe = await home.coordinator.db.read(_last_recipe)
        assert [row.samples for row in recipe.rows] == [4, 4, 1, 4, 4, 4]
        shares = [weight / sum(recipe.weights) for weight in recipe.weights]
        assert shares == pytest.approx([0.2, 0.2, 0.006, 0.198, 0.198, 0.198])


@pytest.mark.parametrize(("least", "shares"), [(1, [0.968, 0.032]), (2, [0.5, 0.5])])
async def test_no_member_of_a_mix_of_two_weighs_more_than_the_other(
    tmp_path: Path, least: int, shares: list[float]
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT.replace("quorum = 2", f"quorum = 2\nmin_contributions = {least}"))
        for seed, (name, samples) in enumerate({"Ann": 900, "Ben": 30}.items()):
            worker = await home.join(name)
            await declare(worker, samples)
            await contribute(worker, seed)
        await merge(home)
        weights = (await home.coordinator.db.read(_last_recipe)).weights
        assert [weight / sum(weights) for weight in weights] == pytest.approx(shares, abs=1e-3)


def _last_recipe(conn: sa.Connection) -> MergeRecipe:
    [row] = conn.execute(sa.select(merges_table)).mappings()
    merged = merges.of_base(conn, row["run_id"], row["base"])
    assert merged is not None
    return recipes.read(conn, merged)


@pytest.mark.parametrize(
    "numbers",
    [
        {"samples": 0, "items": 1},
        {"samples": -1, "items": 1},
        {"samples": 1 << 54, "items": 1},
        {"samples": 1, "items": -1},
        {"samples": 1},
        {"samples": 1.5, "items": 1},
    ],
)
async def test_senseless_numbers_are_refused(tmp_path: Path, numbers: dict[str, Any]) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT)
        ann = await home.join("Ann")
        content = msgspec.json.encode(numbers)
        refused(await ann.http.put(f"{API}/runs/tiny/data", content=content), 400)
        assert (await shown(home)).members == 0


async def test_a_run_on_the_organisers_data_takes_none(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run()
        ann = await home.join("Ann")
        body = msgspec.json.encode(MemberData(samples=9, items=9))
        error = refused(await ann.http.put(f"{API}/runs/tiny/data", content=body), 400)
        assert "data of its organiser" in error.message
        await contribute(ann, 1, sums(2.0))  # sums that nobody asked for are not stored
        rows = await home.coordinator.db.read(
            lambda conn: conn.execute(sa.select(heldout_sums)).all()
        )
        assert rows == []


async def test_an_open_server_takes_no_such_run_and_gives_none_of_it_to_strangers(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(TEXT)
        ann = await home.join("Ann")
        await declare(ann, 50)
    async with local_coordinator(tmp_path, open=True, proof_of_work_bits=1) as home:
        with pytest.raises(InvalidRunFile, match="strangers"):
            await home.coordinator.runs.create(TEXT.replace('"tiny"', '"other"'))
        stranger = await home.stranger("Eve")
        body = msgspec.json.encode(MemberData(samples=9, items=9))
        refused(await stranger.http.put(f"{API}/runs/tiny/data", content=body), 403)
        assert (await idle(stranger))[0] == Reason.NO_FIT
        ann.house, ann.http = home, home.client(f"{ann.worker_id}.{ann.secret}")
        await contribute(ann, 1)
        await nothing_is_done_again(home)


async def nothing_is_done_again(home: LocalCoordinator) -> None:
    """Check that no work of the run was drawn, and that none can be: not even with certainty."""
    inside = home.coordinator
    row = await inside.db.read(lambda conn: runs.by_name(conn, "tiny"))
    drawn = await inside.db.read(lambda conn: conn.execute(sa.select(recomputes)).all())
    assert drawn == []
    assert not Draws(inside.key, 1.0).possible(row)
    works = await inside.db.read(_works)
    assert works
    for work in works:
        assert await inside.db.read(partial(Case.of, row=work, run=row)) is None
        certain = partial(Draws(inside.key, 1.0).drawn, row=work, run=row)
        assert not await inside.db.read(certain)
    assert await inside.db.read(lambda conn: Case.typical(conn, row, 1)) is None


def _works(conn: sa.Connection) -> list[ContributionRow]:
    numbers = conn.execute(sa.select(contributions_table.c.id)).scalars()
    return [contributions.by_id(conn, number) for number in numbers]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (TEXT + "[stop]\npasses = 2\n", "passes of its own data"),
        (TEXT + "[trust]\nrecompute = 0.1\n", "cannot be done again"),
        (TEXT.replace('"gpt"', '"gomoku"'), "makes its own data"),
        (MIXED.replace("quorum = 3", 'quorum = 3\naggregate = "median"'), "leave all but one out"),
        (
            MIXED.replace(
                "quorum = 3\nmin_contributions = 2", "quorum = 2000\nmin_contributions = 1025"
            ),
            "min_contributions = 1025 is more than one merge takes: set it to 1024 or less",
        ),
        (TEXT + "cap = 0.5\n", "cap"),
        (TEXT + "heldout_share = 0.0\n", "heldout_share"),
        (TEXT + "heldout_share = 0.5\n", "heldout_share"),
    ],
)
async def test_a_run_file_that_cannot_be_is_refused(
    tmp_path: Path, changed: str, sentence: str
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run()
        text = changed.replace('"tiny"', '"other"')
        if "gomoku" in text:
            text = 'name = "other"\nworkload = "gomoku"\n[data]\nat = "members"\n'
        with pytest.raises(InvalidRunFile, match=sentence):
            await home.coordinator.runs.create(text)


async def measured_by_two(path: Path) -> list[str]:
    """Let two members measure a version; return the page of the run, and that of joining."""
    async with local_coordinator(path, public_page=True) as home:
        await home.start_run(MIXED)
        for name, samples, loss in (("Ann", 10, 2.0), ("Ben", 90, 4.0)):
            worker = await home.join(name)
            await declare(worker, samples)
            await contribute(worker, samples, sums(loss))
        replies = [await home.client().get(path) for path in ("/runs/tiny", "/join")]
        assert [reply.status_code for reply in replies] == [200, 200]
        texts = [re.sub(r"<[^>]+>", " ", reply.text).split() for reply in replies]
        return [" ".join(words) for words in texts]


def test_page_and_run_show_say_what_stays_and_how_it_is_measured(tmp_path: Path, run: Run) -> None:
    page, join = asyncio.run(measured_by_two(tmp_path))
    assert "volunteer data add tiny PATH" in join
    assert "never leaves its 2 members: 100 samples" in page
    losses = "mean 3.0000, worst 4.0000, spread 1.0000 over 2 members"
    assert losses in page
    text = run("run", "show", "tiny", "--data-dir", tmp_path).out
    assert f"{losses} at version 0" in text
    assert "each version of 2 members at least" in text
    assert "stays with its members: 2 members on 2 machines, 100 samples, 800 items" in text
    shown = json.loads(run("run", "show", "tiny", "--data-dir", tmp_path, "--json").out)
    assert (shown["members"]["samples"], shown["members"]["newest"]["worst"]) == (100, 4.0)
    assert not {"Ann", "Ben"} & set(json.dumps(shown["members"]).split('"'))
