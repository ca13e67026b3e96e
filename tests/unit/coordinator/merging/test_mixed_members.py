"""Versions of members' data through random histories, on both databases.

Whoever trains, leaves, is banned, suspended or forgotten, and whatever is reverted, ended or set
aside, also while a merge is made: every version mixes the updates of as many people as the plan
demands, also when one whose account was forgotten joins again, and a member whose update waits for
others gets no further task.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from typing_extensions import override

from coordinator.accounts import suspension
from coordinator.database import contributions, runs
from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.database.tables.versions import versions as versions_table
from coordinator.rules.run_file import StopSettings
from coordinator.runs import settlement
from shared.errors import VolunteerError
from shared.protocol.accounts import LinkCode
from shared.protocol.base import Reason
from shared.protocol.contributions import Verdict
from shared.protocol.leases import BeginReply, ClaimReply, Lease
from shared.protocol.limits import API
from shared.units import HOUR_S
from tests.support.examples import examples
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
)
from tests.support.members import declare
from tests.support.sums import build_sums

T = TypeVar("T")

LEAST = 2
# Every kind of update and of merge; work of a member overlaps, so that its updates could pile up.
PLANS = (
    'preset = "fedavg"',
    'preset = "fedavg"\nshards = 3',
    'preset = "fedavg"\nmax_staleness = 1',
    'preset = "gradient-average"',
)
MORE = f"""
quorum = 3
min_contributions = {LEAST}
overlap = true
deadline_seconds = 60
codec = "float32"
[data]
at = "members"
[evaluation]
every = 0
"""
MEANWHILE = ("nothing", "suspend", "ban", "forget", "rollback", "stop", "set aside")
MACHINES, WHICH = st.integers(0, 3), st.integers(0, 11)
_numbers = count(1)


class MixMachine(RuleBasedStateMachine):
    """Random histories of a run with three members, one of them with two machines."""

    def __init__(self, runner: asyncio.Runner, home: LocalCoordinator) -> None:
        super().__init__()
        self.runner, self.home = runner, home
        self.inside = home.coordinator

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.runner.run(wait())

    @initialize(plan=st.sampled_from(PLANS))
    def begin(self, plan: str) -> None:
        self.number = next(_numbers)
        self.name = f"mixed-{self.number}"
        head = RUN.partition("[plan]")[0].replace('"tiny"', f'"{self.name}"')
        self.run(self.inside.runs.create(f"{head}[plan]\n{plan}{MORE}"))
        self.run(self.inside.runs.start(self.name))
        self.run_id = self.row.id
        self.members = [self.member(name) for name in ("Ann", "Ben", "Cid")]
        self.machines = [*self.members, self.run(self._second(self.members[0]))]
        self.leases: dict[str, list[Lease]] = {}
        self.people = {worker.volunteer_id: worker.name for worker in self.members}

    def member(self, name: str) -> Worker:
        worker = self.run(self.home.join(f"{name}-{self.number}"))
        self.run(declare(worker, 40, self.name))
        return worker

    async def _second(self, worker: Worker) -> Worker:
        code = decode(await worker.post("/links"), LinkCode).code
        machine = Worker(self.home, worker.name)
        machine.volunteer_id, machine.secret = worker.volunteer_id, worker.secret
        machine.http = self.home.client(f"{machine.worker_id}.{machine.secret}")
        reply = await machine.post("/workers/register", machine.registration(code=code))
        assert reply.status_code == 200, reply.text
        await declare(machine, 40, self.name)
        return machine

    @property
    def row(self) -> runs.RunRow:
        return self.run(self.inside.db.read(lambda conn: runs.by_name(conn, self.name)))

    def updates(self) -> list[contributions.ContributionRow]:
        return self.run(
            self.inside.db.read(lambda conn: contributions.mergeable(conn, self.run_id))
        )

    # --- what members do ---

    @rule(machine=MACHINES)
    def claim(self, machine: int) -> None:
        worker = self.machines[machine]
        waiting = {row.volunteer_id for row in self.updates()}
        alone = len(waiting) < LEAST and worker.volunteer_id in waiting
        body = {"claim_id": f"claim-{next(_numbers)}", "wait_s": 0, "codecs": ["float32"]}
        reply = self.run(worker.post("/claims", {**body, "runs": [self.name]}))
        if reply.status_code in (401, 403):  # banned or forgotten
            return
        answer = decode(reply, ClaimReply)
        held = [lease for lease in self.leases.get(worker.worker_id, ()) if self.is_held(lease)]
        if answer.lease is not None:
            assert not alone
            assert not held or len(waiting) >= LEAST
            self.leases.setdefault(worker.worker_id, []).append(answer.lease)
        elif alone and self.row.state == "running" and answer.idle is not None:
            assert answer.idle.reason in (Reason.IN_FLIGHT, Reason.NO_FIT, Reason.BANNED)
            if answer.idle.reason == Reason.IN_FLIGHT:
                assert "waits to be mixed with those of 1 other member" in answer.idle.message

    def is_held(self, lease: Lease) -> bool:
        held = sa.text("SELECT state FROM tasks WHERE id = :task AND attempt = :attempt")
        values = {"task": lease.task, "attempt": lease.attempt}
        state = self.run(
            self.inside.db.read(lambda conn: conn.execute(held, values).scalar_one_or_none())
        )
        return state == "doing"

    @rule(machine=MACHINES)
    def hand_in(self, machine: int) -> None:
        worker = self.machines[machine]
        leases = self.leases.get(worker.worker_id)
        if leases:
            self.run(self._hand_in(worker, leases.pop(0)))

    async def _hand_in(self, worker: Worker, lease: Lease) -> str:
        """Return the state of the update; "" if the lease is lost."""
        begun = await worker.post(f"/tasks/{lease.task}/begin", {"attempt": lease.attempt})
        if begun.status_code >= 400:
            return ""
        data = await worker.update(self.name, next(_numbers))
        if (await worker.announce(lease, data)).status_code >= 400:
            return ""
        await worker.upload(lease, data)
        said = worker.submission(lease, decode(begun, BeginReply), data)
        reply = await worker.post(f"/tasks/{lease.task}/submit", said)
        return "" if reply.status_code >= 400 else decode(reply, Verdict).state

    @rule(machine=MACHINES, times=st.integers(1, 2))
    def contribute(self, machine: int, times: int) -> None:
        for _ in range(times):
            self.claim(machine)
            self.hand_in(machine)

    @rule(machine=MACHINES, keeps=st.booleans())
    def keep_data(self, machine: int, keeps: bool) -> None:
        http, place = self.machines[machine].http, f"{API}/runs/{self.name}/data"
        content = b'{"samples": 40, "items": 320}'
        self.run(http.put(place, content=content) if keeps else http.delete(place))

    # --- what happens to them ---

    @rule(what=st.sampled_from(("nothing",) * 6 + MEANWHILE), which=WHICH)
    def merge(self, what: str, which: int) -> None:
        """Merge if it is due; once the new files are stored, something else happens."""
        put_file, left = self.inside.blobs.put_file, [what]

        async def and_meanwhile(sha256: str, path: Path) -> None:
            await put_file(sha256, path)
            if left:
                await self._happen(left.pop(), which)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.inside.blobs, "put_file", and_meanwhile)
            self.run(self.inside.merger.merge_if_due(self.run_id))

    @rule(what=st.sampled_from(MEANWHILE), which=WHICH)
    def happens(self, what: str, which: int) -> None:
        self.run(self._happen(what, which))

    async def _happen(self, what: str, which: int) -> None:
        member, now = self.members[which % len(self.members)], self.home.clock.now()
        row = await self.inside.db.read(lambda conn: runs.by_id(conn, self.run_id))
        waiting = await self.inside.db.read(partial(contributions.mergeable, run_id=row.id))
        people, db = self.inside.volunteers, self.inside.db
        match what:
            case "suspend":
                again = partial(suspension.suspend, reason="copies", now=now)
                await db.write(partial(again, volunteer_id=member.volunteer_id))
            case "ban":
                with suppress(VolunteerError):  # forgotten before
                    await people.ban(member.volunteer_id)
            case "forget":
                await people.forget(member.volunteer_id)
                await self._join_again(member)
            case "rollback" if row.head > 0 and row.state == "running":
                await self.inside.runs.rollback(self.name, which % row.head)
            case "stop" if row.state == "running":
                await self.inside.runs.stop(self.name)
                end = StopSettings(versions=10_000 + next(_numbers))
                await self.inside.wind_down.extend(self.name, end, yes=True)
            case "set aside" if waiting:
                one = waiting[which % len(waiting)]
                await db.write(
                    partial(settlement.set_aside, run=row, row=one, why="", now=now, kind=None)
                )

    async def _join_again(self, member: Worker) -> None:
        """Let the person whose account was forgotten join under another name."""
        again = await self.home.join(f"again-{next(_numbers)}")
        self.people[again.volunteer_id] = self.people[member.volunteer_id]
        at = self.members.index(member)
        self.members[at] = self.machines[at] = again
        row = await self.inside.db.read(lambda conn: runs.by_id(conn, self.run_id))
        if row.state == "running":
            await declare(again, 40, self.name)

    @rule(machine=st.integers(0, 2))
    def contributes_under_two_names(self, machine: int) -> None:
        self.contribute(machine, 1)
        self.run(self._happen("forget", machine))
        self.contribute(machine, 1)
        self.time_passes(95)
        self.merge("nothing", 0)

    @rule(which=WHICH)
    def is_vouched_for_again(self, which: int) -> None:
        member = self.members[which % len(self.members)]

        people = self.inside.volunteers
        with suppress(VolunteerError):  # forgotten
            self.run(people.unban(member.volunteer_id))
        with suppress(VolunteerError):  # not suspended
            self.run(people.unsuspend(member.volunteer_id, "a mistake"))

    @rule(seconds=st.sampled_from([1, 95, 86_400]))
    def time_passes(self, seconds: int) -> None:
        self.run(self.home.clock.advance(seconds))
        self.run(self.inside.task_leases.expire())

    # --- what must hold ---

    @invariant()
    @precondition(lambda self: hasattr(self, "run_id"))
    def every_version_mixes_enough_members(self) -> None:
        v, c = versions_table.c, contributions_table.c

        def read(conn: sa.Connection) -> list[tuple[int, list[str]]]:
            made = conn.execute(
                sa.select(v.version, v.contributions).where(
                    v.run_id == self.run_id, v.kind == "merge"
                )
            )
            mixed = sa.select(c.volunteer_id).where(c.state == "merged")
            return [
                (version, list(conn.execute(mixed.where(c.id.in_(json.loads(ids)))).scalars()))
                for version, ids in made
            ]

        for version, accounts in self.run(self.inside.db.read(read)):
            people = {self.people[account] for account in accounts}
            assert len(people) >= LEAST, f"version {version} is of {people}"

    @override
    def teardown(self) -> None:
        if not hasattr(self, "machines"):
            return
        self.every_version_mixes_enough_members()
        for name in ("Dan", "Eve"):  # two who come now make the next version
            worker = self.member(name)
            self.people[worker.volunteer_id] = name
            lease = self.run(worker.claim())
            assert self.run(self._hand_in(worker, lease)) == "accepted"
        self.run(self.home.clock.advance(HOUR_S))
        before = self.row.head
        while self.run(self.inside.merger.merge_if_due(self.run_id)):
            pass
        assert self.row.head > before
        self.every_version_mixes_enough_members()
        self.run(self.inside.runs.stop(self.name))
        assert self.run(self.inside.ledger.check()) == ()


@pytest.mark.parametrize("count", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_a_version_is_never_of_fewer_members_than_its_plan_demands(
    database_url: str, tmp_path: Path, count: int
) -> None:
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        opened = local_coordinator(tmp_path, database=database_url)
        home = runner.run(opened.__aenter__())
        stack.callback(lambda: runner.run(opened.__aexit__(None, None, None)))
        runner.run(home.coordinator.datasets.add(build_sums))
        run_state_machine_as_test(
            lambda: MixMachine(runner, home),  # type: ignore[arg-type]  # any factory will do
            settings=settings(
                max_examples=examples(4 * count),
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
