"""Intake of games: the workload checks a submitted file of self-play games or of a match; valid
games are stored and paid.

Valid games count even if others of their file do not; a file with too many false games is refused
as a whole. A fault that a player cannot avoid (a version too old at the start of a game) does not
count against the worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from coordinator.checking.case import Draws
from coordinator.checking.draw_effects import settle
from coordinator.compute import Compute, Stop
from coordinator.database import (
    contributions,
    datasets,
    experience,
    recomputes,
    runs,
    tasks,
    verdicts,
    versions,
)
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.ledger import escrow, payments
from coordinator.database.recomputes import DrawTerms
from coordinator.database.runs import RunRow
from coordinator.database.tasks import FailureKind, TaskRow
from coordinator.platform import Platform, PlatformService
from coordinator.rules.draws import Result
from coordinator.rules.validation import SUSPENDED, TOO_LATE, Judgement, excluded
from coordinator.runs.definition import definition, price_of_flops
from coordinator.runs.settlement import put_back
from coordinator.scheduling import lease_message
from coordinator.scheduling.lease_message import own_data
from shared.decoding import decode
from shared.errors import InvalidRunFile, NotFound
from shared.protocol.base import Reason
from shared.text import counted
from shared.workloads.base import Job
from shared.workloads.experience import Experience, Inspection, KnownVersion

if TYPE_CHECKING:
    from sqlalchemy import Connection


OPPONENT = "opponent"  # key of a match task's asset and metadata that name the other version
DRAWS = 20  # newest draws of an account, of one kind, whose faults are summed
# share of a self-play file's games that may be refused without refusing the file; at least one may
TOLERATED_SHARE = 0.05


class HarvestCase(msgspec.Struct, frozen=True, kw_only=True):
    """Task that a file of games answers, and the other inputs of its check."""

    run: RunRow
    task: TaskRow
    job: Job
    known: tuple[KnownVersion, ...]  # versions that may have played
    drawn: bool = False  # True: the check repeats every search, not only a few

    @property
    def match(self) -> bool:
        return self.task.kind == "evaluate"

    @property
    def asked(self) -> int:
        """Return how many games the task requested."""
        return self.task.stop - self.task.start

    def price(self, inspection: Inspection) -> int:
        """Return the micro-credits of the games that were found valid."""
        pacing = definition(self.run).pacing
        flops = inspection.evaluations * (pacing.evaluation_flops if pacing else 0.0)
        return price_of_flops(self.run.price_micro, self.run.step_flops, flops)


def inspect(
    stop: Stop, case: HarvestCase, path: Path, files: Mapping[int | str, Path]
) -> Inspection:
    """Check a file of games; `files` has the weights of every version that may have played, and the
    files of the run.
    """

    def file(name: int | str) -> Path:
        if name not in files:
            raise NotFound(f"version {name} may not play here")
        return files[name]

    # The secret is drawn after submission, so that no client knows which games are checked.
    return experience_of(case.run).inspect(
        case.job, path.read_bytes(), case.known, file, secrets.randbits(63), whole=case.drawn
    )


class FaultCount(msgspec.Struct, frozen=True, kw_only=True):
    """Recomputed parts of a drawn file, and the number that differed."""

    read: int = 0
    faults: int = 0


class Harvest(PlatformService):
    """Checks files of games in the process of `Compute`, since a check runs the network."""

    def __init__(self, on: Platform, compute: Compute, draws: Draws) -> None:
        super().__init__(on)
        self._draws = draws
        self._compute = compute

    async def check(self, row: ContributionRow) -> None:
        """Check the games of a contribution, and record the verdict."""
        case = await self._db.read(lambda conn: self._case(conn, row))
        path = await self._blobs.local(row.sha256)
        about = definition(case.run)
        hashes: dict[int | str, str] = {version.number: version.sha256 for version in case.known}
        hashes |= {n: ref.sha256 for n, ref in about.workload.files(about.file.model).items()}
        files = {name: await self._blobs.local(sha256) for name, sha256 in hashes.items()}
        inspection, seconds = await self._compute.timed(inspect, case, path, files)
        paid = msgspec.structs.replace(row, price_micro=case.price(inspection))
        if await self._db.read(lambda conn: self._draws.drawn(conn, paid, case.run)):
            case = msgspec.structs.replace(case, drawn=True)
            inspection, more = await self._compute.timed(inspect, case, path, files)
            seconds += more
        sha256 = await self._blobs.put_bytes(inspection.data) if inspection.data else ""

        def write(conn: Connection) -> None:
            self._decide(conn, row, case, inspection, sha256)
            contributions.checked(conn, row.id, seconds)

        await self._db.write(write)

    def _case(self, conn: Connection, row: ContributionRow) -> HarvestCase:
        run = runs.by_id(conn, row.run_id)
        task = tasks.holder(conn, row.task_id, for_update=False)
        spec = lease_message.read_spec(conn, run.id)
        base = versions.get(conn, run.id, row.base_version)
        job = msgspec.structs.replace(
            lease_message.job(lease_message.JobBase.at(spec, base), task),
            base_version=base.version,
            base_sha256=base.published_sha256,
        )
        players = _possible_players(conn, run, task, base.version)
        return HarvestCase(run=run, task=task, job=job, known=players)

    def _decide(
        self,
        conn: Connection,
        row: ContributionRow,
        case: HarvestCase,
        inspection: Inspection,
        sha256: str,
    ) -> None:
        now = self._clock.now()
        account = accounts.locked(conn, row.volunteer_id)  # may be banned in this moment
        row = contributions.by_id(conn, row.id, lock=True)
        if row.state != "checking":
            return  # another replica decided it
        run = runs.by_id(conn, row.run_id)
        price = case.price(inspection)
        row = msgspec.structs.replace(row, price_micro=price)
        judgement = judge(case, inspection, run.state)
        if judgement.state == "accepted" and case.drawn:
            judgement = self._with_earlier(conn, row, run, inspection) or judgement
        judgement = excluded(judgement, account.state, account.standing)
        verdicts.decide(
            conn,
            msgspec.structs.replace(row, price_micro=price),
            judgement.state,
            now=now,
            reason=judgement.reason,
            message=judgement.message,
            price_micro=price,
        )
        if judgement.state == "rejected":
            kind: FailureKind | None = None if judgement.reason == Reason.STALE else "failure"
            put_back(conn, row, run, kind, judgement.message, now)
            if case.drawn and judgement.reason == Reason.EXPERIENCE.value:
                self._store_draw(conn, row, inspection, "unproven", judgement.message)
            return
        tasks.finish_all(conn, [row.task_id], now)
        if judgement.state == "accepted":
            accounts.count_accepted(conn, [(row.volunteer_id, price)])
            self._store(conn, row, case, inspection, sha256)
        payments.post_step(conn, "pending", [payments.Payment.of(row)], now)
        (escrow.withhold if judgement is SUSPENDED else escrow.pay)(conn, [row], now)
        if case.drawn and judgement is not SUSPENDED:
            pacing = definition(run).pacing
            unit = pacing.unit if pacing else "game"
            sentence = f"all of {counted(inspection.episodes, unit)} replayed"
            self._store_draw(conn, row, inspection, "passed", sentence)

    def _with_earlier(
        self, conn: Connection, row: ContributionRow, run: RunRow, inspection: Inspection
    ) -> Judgement | None:
        """Refuse a drawn file if it and the account's earlier drawn files together have too many
        faults, since a little cheating makes few faults in each file; else return None.
        """
        earlier = recomputes.passed_of(conn, row, DRAWS - 1)
        counts = [decode(work, FaultCount) for work in earlier]
        faults = inspection.faults + sum(count.faults for count in counts)
        read = inspection.read + sum(count.read for count in counts)
        if not experience_of(run).refuted(faults, read):
            return None
        drawn = counted(len(counts) + 1, "drawn task")
        message = (
            f"{faults:,} of {read:,} tokens of {drawn} are not what their versions write with their"
            " seeds"
        )
        return Judgement(state="rejected", reason=Reason.EXPERIENCE.value, message=message)

    def _store_draw(
        self,
        conn: Connection,
        row: ContributionRow,
        inspection: Inspection,
        result: Result,
        sentence: str,
    ) -> None:
        """Store the draw of this file with its result, since all its games were replayed."""
        now = self._clock.now()
        work = msgspec.json.encode(
            FaultCount(read=inspection.read, faults=inspection.faults)
        ).decode()
        order = DrawTerms(work=work, flops=0.0, kind="")
        accounts.count_draw(conn, row.volunteer_id)
        settle(conn, recomputes.add(conn, row, order), result, (sentence, "{}"), now)

    def _store(
        self,
        conn: Connection,
        row: ContributionRow,
        case: HarvestCase,
        inspection: Inspection,
        sha256: str,
    ) -> None:
        now = self._clock.now()
        if case.match:
            against = next(v.number for v in case.known if v.number != row.base_version)
            experience.add_match(
                conn,
                experience.MatchRow(
                    run_id=row.run_id,
                    wins=inspection.wins,
                    draws=inspection.draws,
                    losses=inspection.losses,
                    contribution_id=row.id,
                    version=row.base_version,
                    against=against,
                    at=now,
                ),
            )
            return
        blob = (sha256, len(inspection.data), "experience")
        datasets.register(conn, [blob], now, self._blobs.serials)
        experience.add_harvest(
            conn,
            experience.HarvestRow(
                run_id=row.run_id,
                episodes=inspection.episodes,
                samples=inspection.samples,
                contribution_id=row.id,
                sha256=sha256,
                size=len(inspection.data),
                chunk=None,
                at=now,
            ),
        )
        experience.add_rollouts(conn, row.run_id, inspection.rollouts)


def experience_of(run: RunRow) -> Experience:
    """Return the experience interface of a run's workload. Raises InvalidRunFile without it."""
    declared = definition(run).workload.experience
    if declared is None:
        raise InvalidRunFile(f'the workload "{run.workload}" does not make data of its own')
    return declared


def judge(case: HarvestCase, inspection: Inspection, run_state: str) -> Judgement:
    """Return the verdict on a file of games."""
    pacing = definition(case.run).pacing
    unit = pacing.unit if pacing else "game"
    missing = max(0, case.asked - inspection.episodes - inspection.refused)
    bad = inspection.refused + missing
    tolerated = 0 if case.match else max(1, int(TOLERATED_SHARE * case.asked))
    if bad > tolerated or not inspection.episodes:
        complaint = (
            inspection.complaint or f"the file has {case.asked - missing} {unit}s of {case.asked}"
        )
        message = f"{bad} of {case.asked} {unit}s were refused: {complaint}"[:500]
        return Judgement(state="rejected", reason=Reason.EXPERIENCE.value, message=message)
    if run_state not in runs.OPEN:
        return TOO_LATE
    message = f"{counted(inspection.episodes, unit)}, all valid"
    if left := case.asked - inspection.episodes:
        message = f"{counted(inspection.episodes, f'valid {unit}')}, {left} left out: {inspection.complaint}"[
            :400
        ]
    return Judgement(state="accepted", message=message)


def _possible_players(
    conn: Connection, run: RunRow, task: TaskRow, base: int
) -> tuple[KnownVersion, ...]:
    """Return the versions that may have played: the base and all newer versions, or a match's
    two.
    """
    if task.kind == "evaluate":
        data = own_data(task)
        other = int(data.meta[OPPONENT]) if data is not None else base
        numbers = [base, other]
        rows = [versions.get(conn, run.id, number) for number in numbers]
    else:
        rows = [
            row
            for row, evaluation in versions.listing(conn, run.id, base - 1, 10_000)
            if not evaluation.pruned
        ]
    return tuple(KnownVersion(number=row.version, sha256=row.published_sha256) for row in rows)
