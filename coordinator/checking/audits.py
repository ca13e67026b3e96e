"""Audits: recomputes that a vetted volunteer makes for another, as paid tasks, when they wait long
or are too large for the server.

    open       the task waits for the first suitable auditor, or for the server
    answered   with sums of the result, which the server compares with the update's. If they agree,
               the work passes. If they differ, or the agreeing answer is drawn for confirmation,
               the organiser recomputes the task, which settles both the work and the answer

The auditor's pay is at stake like any other pay, and is taken back if the organiser's own recompute
shows that the answer was made up.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import structlog

from coordinator.accounts.suspension import suspend
from coordinator.checking.case import Draws
from coordinator.checking.draw_effects import bond_of, release, settle
from coordinator.checking.recompute_comparison import likeness
from coordinator.database import audits, contributions, recomputes, runs, tasks, verdicts
from coordinator.database import volunteers as accounts
from coordinator.database.contributions import ContributionRow
from coordinator.database.ledger import escrow, payments
from coordinator.database.ledger.payments import Payment
from coordinator.database.ledger.reversal import take_back
from coordinator.database.recomputes import RecomputeRow, StoredCase
from coordinator.database.runs import RunRow
from coordinator.platform import Platform, PlatformService
from coordinator.rules import audits as rules
from coordinator.rules import recompute_result as bounds
from coordinator.rules.draws import Likeness, Redone, Result
from coordinator.rules.validation import Judgement, excluded
from coordinator.runs.definition import definition
from coordinator.runs.settlement import put_back
from coordinator.storage.blobs import in_pool
from shared.decoding import decode
from shared.errors import NotFound, VolunteerError
from shared.protocol.base import Reason
from shared.protocol.limits import AUDIT_BYTES
from shared.tensors import sketch
from shared.tensors.codec import codec as codec_named

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

    from coordinator.database.tasks import FailureKind
    from shared.tensors.spec import Schema

POLL_S = 60.0
THANKS = "your sums arrived; the organiser recomputes the task if they differ"
TOO_LATE = Judgement(
    state="superseded",
    message="the organiser did the task meanwhile: not paid",
)
AGREES = "a volunteer did it again, and its sums agree"
SHUT_OUT = Judgement(
    state="rejected",
    message="this account is banned or suspended: its answer proves nothing and is not paid",
)

log = structlog.get_logger("checks")


class Audits(PlatformService):
    """Opens the audits of one server, and judges their answers."""

    def __init__(self, on: Platform, draws: Draws) -> None:
        super().__init__(on)
        self._draws = draws

    async def run(self, stop: asyncio.Event) -> None:
        """Open audits of waiting recomputes, until `stop` is set."""
        watch = self._signals.watch("recomputes")
        while not stop.is_set():
            await self.open()
            await watch.wait(POLL_S)

    async def open(self) -> int:
        """Offer volunteers the recomputes that waited long or are large; return their number."""
        now = self._clock.now()
        await self._db.write(lambda conn: audits.tidy(conn, now))
        opened = 0
        for row in await self._db.read(lambda conn: audits.to_open(conn, now)):
            opened += await self._db.write(partial(self._open, contribution_id=row))
        if opened:
            self._signals.notify("queue")
        return opened

    def _open(self, conn: Connection, contribution_id: int) -> bool:
        now, row = self._clock.now(), recomputes.get(conn, contribution_id, lock=True)
        if row is None or row.state != "waiting" or row.audit_id is not None:
            return False  # another replica was faster
        account = accounts.existing(conn, row.volunteer_id)
        contribution = contributions.by_id(conn, contribution_id)
        if not audits.is_anybody(conn, account, contribution.price_micro, now):
            return False
        audits.open_task(conn, row, contribution)
        return True

    # --- the answer ---

    async def check(self, row: ContributionRow) -> None:
        """Check the answer to an audit, and record a verdict. Raises NotFound without the audit."""

        def read(conn: Connection) -> tuple[int, ContributionRow, RunRow]:
            audit = audits.by_task(conn, row.task_id)
            if audit is None:
                raise NotFound(f"task {row.task_id} is not an audit")
            checked = contributions.by_id(conn, audit.contribution_id)
            return audit.seed, checked, runs.by_id(conn, row.run_id)

        seed, checked, run = await self._db.read(read)
        path = await self._blobs.local(row.sha256)
        sums = await in_pool(_sums_of_answer, path)
        comparison = None if sums is None else await self._compare(seed, checked, run, sums)
        await self._db.write(lambda conn: self._decide(conn, row.id, sums, comparison))
        for topic in ("recomputes", "queue"):  # the task may be for another account now
            self._signals.notify(topic)

    async def _compare(
        self, seed: int, checked: ContributionRow, run: RunRow, sums: bytes
    ) -> Likeness | None:
        """Compare the answered sums with the update's; return None if the update's file cannot be
        read.
        """
        try:
            path = await self._blobs.local(checked.sha256)
            own_sums = await in_pool(
                _sums_of_update, path, definition(run).schema, checked.codec, seed
            )
        except VolunteerError as error:
            log.warning("audit", contribution=checked.id, reason=str(error))
            return None
        return likeness(own_sums, sums)

    def _decide(
        self,
        conn: Connection,
        contribution_id: int,
        sums: bytes | None,
        comparison: Likeness | None,
    ) -> None:
        """Record the verdict on an answer, put its pay at stake, and store its sums."""
        now = self._clock.now()
        row = contributions.by_id(conn, contribution_id)
        if (audit := audits.by_task(conn, row.task_id)) is None:
            return
        # the auditor may be banned in this moment; `settle` changes the audited account
        accounts.lock(conn, {row.volunteer_id, audit.volunteer_id})
        row = contributions.by_id(conn, contribution_id, lock=True)
        audit = audits.by_task(conn, row.task_id, lock=True)
        if row.state != "checking" or audit is None:
            return  # another replica was faster
        judgement = Judgement(state="accepted", message=THANKS)
        account = accounts.existing(conn, row.volunteer_id)
        if sums is None:
            why = f"an answer to an audit has {AUDIT_BYTES} bytes: finite numbers of float32"
            judgement = Judgement(state="rejected", reason=Reason.FRAME.value, message=why)
        elif audit.state == "done":
            judgement = TOO_LATE
        elif excluded(judgement, account.state, account.standing) is not judgement:
            judgement = SHUT_OUT
        verdicts.decide(
            conn,
            row,
            judgement.state,
            now=now,
            reason=judgement.reason,
            message=judgement.message,
        )
        if sums is None or judgement is SHUT_OUT:  # the audit is for another account
            kind: FailureKind | None = "failure" if sums is None else None
            run = runs.by_id(conn, row.run_id)
            put_back(conn, row, run, kind, judgement.message, now)
            audits.decline(conn, row.task_id, row.volunteer_id)
            return
        tasks.finish_all(conn, [row.task_id], now)
        payments.post_step(conn, "pending", [Payment.of(row)], now)
        if judgement.state != "accepted":
            escrow.withhold(conn, [row], now)
            return
        escrow.hold(conn, [row], now)
        self._store_answer(conn, audit, row, sums, comparison)

    def _store_answer(
        self,
        conn: Connection,
        audit: RecomputeRow,
        row: ContributionRow,
        sums: bytes,
        comparison: Likeness | None,
    ) -> None:
        """Store an answer; if it agrees and is not drawn for confirmation, the recompute passes."""
        now, agrees = self._clock.now(), comparison is not None and rules.agree(comparison)
        answer = {"answer_id": row.id, "auditor_id": row.volunteer_id, "sums": sums}
        audits.change(conn, audit, agrees=agrees, **answer)
        if comparison is not None and agrees and not self._is_confirmed(conn, audit, row):
            settle(conn, audit, "passed", (AGREES, "{}"), now, _share(audit, comparison))
        log.info("audit", contribution=audit.contribution_id, agrees=agrees)

    def _is_confirmed(self, conn: Connection, audit: RecomputeRow, row: ContributionRow) -> bool:
        """Return True if the organiser recomputes the task although the answer agrees."""
        freed = escrow.at_stake(conn, audit.volunteer_id, audit.contribution_id)
        gained = freed + 2 * row.price_micro  # the audited work has the same price as the answer
        auditor = accounts.existing(conn, row.volunteer_id)
        stake = escrow.at_stake(conn, auditor.id) - row.price_micro
        stake = min(stake, bond_of(auditor))  # earlier draws may free all pay at stake but the bond
        return self._draws.confirmed(
            row, rules.confirmed_chance(gained, None if auditor.invited else stake)
        )


def _share(audit: RecomputeRow, comparison: Likeness) -> float:
    """Return the share of the worker's task that an agreeing answer shows."""
    precision = decode(audit.work, StoredCase).job.train.precision
    redone = Redone(cosine=comparison.cosine, norm_ratio=comparison.norm_ratio)
    return bounds.share(redone, precision, comparable=True)


def _sums_of_update(path: Path, schema: Schema, codec: str, seed: int) -> bytes:
    """Return the sums of an update, read from its file."""
    with codec_named(codec).decode(path, schema) as update:
        return sketch.audit_sums(update, schema, seed).tobytes()


def _sums_of_answer(path: Path) -> bytes | None:
    """Return the sums of an answer; None if they are malformed."""
    import numpy as np

    data = path.read_bytes()
    if len(data) != AUDIT_BYTES or not np.isfinite(np.frombuffer(data, np.float32)).all():
        return None
    return data


# --- the end of an audit: within the transactions of recomputes ---


def judge(
    conn: Connection, audit: RecomputeRow, figures: Redone | None, proved: Result, now: float
) -> None:
    """Judge an answer by the organiser's recompute.

    An answer that the recompute contradicts is made up only if the recompute confirmed the worker's
    update, or if the answer agrees with that update. If all three differ, the task amplifies
    rounding.
    """
    assert audit.answer_id is not None
    assert audit.sums is not None
    answer = contributions.by_id(conn, audit.answer_id)
    may_blame = proved == "passed" or audit.agrees
    if (
        figures is not None
        and figures.sums
        and may_blame
        and rules.made_up(likeness(figures.sums, audit.sums), figures)
    ):
        why = f"a recompute of the audited task {answer.task_id} differs from its audit"
        suspend(conn, answer.volunteer_id, why, now)
        take_back(conn, [Payment.of(answer)], why, now)
    else:  # the auditor's pay waited for the result
        release(conn, accounts.locked(conn, answer.volunteer_id), now)
