"""Proposal of a rollback from versions made with the work of accounts suspended later.

No merge is undone automatically. If contributions of a suspended account, or with reversed pay, had
more than `SHARE` of a version's weight, a rollback to the version before it is proposed to the
organiser.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from coordinator.database import contributions, evaluations, versions
from coordinator.database.runs import RunRow
from coordinator.database.versions import VersionRow
from coordinator.merging.merge_recipe import MergeTerms, of_contributions
from shared.decoding import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

RECENT = 20  # newest ancestors of the head that are examined
SHARE = 0.2  # share of a version's weight above which a rollback is proposed


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Proposed rollback, to the version before the first version with too large a share of
    discredited work.
    """

    run: str
    version: int  # first version that is spoilt
    share: float  # share of its weight that discredited contributions had
    to: int

    @property
    def command(self) -> str:
        return f"coordinator run rollback {self.run} --to {self.to}"


def proposal(conn: Connection, run: RunRow) -> Proposal | None:
    """Return the rollback that is proposed for a run; None if the run needs no rollback."""
    first: tuple[VersionRow, float] | None = None
    line = _line(conn, run)
    if not line:
        return None
    spoilt = contributions.discredited(conn, run.id, line[-1].version)
    for row in line:
        share = _share(conn, run, row, spoilt.get(row.version, frozenset()))
        if share > SHARE:
            first = row, share
    if first is None:
        return None
    version, share = first
    to = version.parent
    while to and evaluations.evaluation(conn, run.id, to).pruned:
        to = _before(conn, versions.get(conn, run.id, to))
    if to is None:
        return None
    return Proposal(run=run.name, version=version.version, share=share, to=to)


def _line(conn: Connection, run: RunRow) -> Sequence[VersionRow]:
    """Return the newest ancestors of the head, newest first, without reverted versions."""
    line: list[VersionRow] = []
    rows: dict[int, VersionRow] = {}
    at: int | None = run.head if run.head > 0 else None
    while at is not None and len(line) < RECENT:
        if at not in rows:
            before = versions.listing(conn, run.id, at - RECENT, RECENT)  # in one statement
            rows = {row.version: row for row, _ in before}
        row = rows[at]
        if row.kind == "merge":
            line.append(row)
        at = _before(conn, row)
    return line


def _before(conn: Connection, row: VersionRow) -> int | None:
    """Return the version from which a version was made; a rollback skips the reverted versions."""
    return versions.content_before(conn, row) if row.kind == "rollback" else row.parent


def _share(conn: Connection, run: RunRow, row: VersionRow, spoilt: frozenset[int]) -> float:
    """Return the share that the `spoilt` contributions have in a version's weight."""
    if not spoilt or row.parent is None:
        return 0.0
    merge_recipe = of_contributions(
        conn,
        run=run,
        base=versions.get(conn, run.id, row.parent),
        rows=contributions.by_ids(conn, decode(row.contributions, list[int])),
        terms=MergeTerms(),
    )
    weights = merge_recipe.weights
    merged = zip(merge_recipe.rows, weights, strict=True)
    bad = sum(weight for contribution, weight in merged if contribution.id in spoilt)
    return bad / sum(weights) if bad else 0.0
