"""Figures of a run whose members keep its data: their number, their samples, and losses measured on
the data that each holds out. No figure names a member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Literal

import msgspec

from coordinator.database import runs
from coordinator.database.members import heldout_rows, member_rows
from coordinator.runs.definition import definition
from shared.protocol.members import HeldoutSums

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from coordinator.database.runs import RunRow

TURNOUT_MIN = 0.5  # least members of a version that counts, as a share of the most of any version


class MemberLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Loss of a version over the members that measured it; each member is one voice."""

    version: int
    members: int
    mean: float
    worst: float
    spread: float  # standard deviation over the members

    @classmethod
    def of(cls, version: int, losses: Sequence[float]) -> MemberLoss:
        return cls(
            version=version,
            members=len(losses),
            mean=fmean(losses),
            worst=max(losses),
            spread=pstdev(losses),
        )


class MemberFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a run with data now, the sums of their data, and their losses."""

    members: int
    machines: int
    samples: int
    items: int
    heldout: int
    cap: float  # no member weighs more than this times its equal share
    best_by: Literal["mean", "worst"] | None  # None: a private run, measured on its example
    newest: MemberLoss | None = None  # of the newest version that enough members measured
    best: MemberLoss | None = None


def comparable(losses: Mapping[int, Sequence[float]]) -> list[MemberLoss]:
    """Return the losses of the versions that count, oldest first: each was measured by at least
    half as many members as the version with the most.
    """
    most = max(map(len, losses.values()), default=0)
    return [
        MemberLoss.of(version, values)
        for version, values in sorted(losses.items())
        if len(values) >= TURNOUT_MIN * most
    ]


def best_of(losses: Sequence[MemberLoss], best_by: Literal["mean", "worst"]) -> MemberLoss | None:
    """Return the lowest loss; of equal losses, the newest version's. None without losses."""

    def rank(loss: MemberLoss) -> tuple[float, int]:
        return (loss.mean if best_by == "mean" else loss.worst), -loss.version

    return min(losses, key=rank, default=None)


def record_loss(conn: Connection, run_id: int, owner: tuple[str, str], sums: HeldoutSums) -> None:
    """Store the sums of a machine, and choose the best version of its run anew. Nothing is stored
    for a version that does not exist, or for a run whose members do not choose its best version.
    `owner` is the volunteer and the machine.
    """
    run = runs.by_id(conn, run_id, lock=True)
    about = definition(run)
    if not about.members_choose or not 0 <= sums.version <= run.head:
        return
    heldout_rows.store(conn, run_id, owner, sums)
    best = best_of(comparable(heldout_rows.losses(conn, run_id)), about.file.data.best)
    if best is not None and best.version != run.best:
        runs.set_values(conn, run_id, best=best.version)


def figures(conn: Connection, run: RunRow) -> MemberFigures | None:
    """Return the figures of the members of a run; None if they keep no data."""
    about = definition(run)
    if not about.at_members:
        return None
    settings = about.file.data
    counts = member_rows.counts(member_rows.of_run(conn, run.id))
    losses = comparable(heldout_rows.losses(conn, run.id))
    return MemberFigures(
        **msgspec.structs.asdict(counts),
        cap=settings.cap,
        best_by=settings.best if about.members_choose else None,
        newest=losses[-1] if losses else None,
        best=best_of(losses, settings.best),
    )
