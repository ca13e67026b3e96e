"""Parts of a merge: a leased job for each shard, done by a replica with a free thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Connection, exists, insert, select

from coordinator.database.engine.leased_jobs import LeasedJobs
from coordinator.database.engine.statements import deletion, equals
from coordinator.database.tables.merges import merge_parts, merges, state_parts
from shared.decoding import decode

Phase = Literal["survey", "merge"]
FAILURES_MAX = 2  # number of faults of disks or networks after which the merge fails


class PartRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `merge_parts`; see tables/merges.py."""

    id: int
    merge_id: int
    phase: Phase
    shard: int
    state: Literal["todo", "leased", "done", "failed"]
    owner: str
    attempt: int
    lease_until: float
    failures: int
    message: str
    result: str


JOBS = LeasedJobs(merge_parts, PartRow, free="todo", leased="leased")


class MergedPart(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one part of a merge: its stored files, and squared norms of its update."""

    sha256: str  # weights, or a survey
    size: int
    state_sha256: str = ""
    state_size: int = 0
    squares: tuple[float, ...] = ()  # squared norm of the update in each piece


class StateFile(NamedTuple):
    """One file of a server-optimiser state that is stored in shards."""

    shard: int
    sha256: str
    size: int


def begin(conn: Connection, merge_id: int, phases: Sequence[Phase], shards: Sequence[int]) -> None:
    """Insert the parts of a newly leased merge; the parts of an earlier try are deleted."""
    drop(conn, merge_id)
    blank = {"state": "todo", "failures": 0, "message": "", "result": ""}
    rows = [
        blank | {"merge_id": merge_id, "phase": phase, "shard": shard}
        for phase in phases
        for shard in shards
    ]
    conn.execute(insert(merge_parts), rows)


_DROP = deletion(merge_parts, "settled").where(equals(merge_parts.c.merge_id))


def drop(conn: Connection, merge_id: int) -> None:
    """Delete the parts of a finished merge."""
    conn.execute(_DROP, {"where_merge_id": merge_id})


def of_merge(conn: Connection, merge_id: int) -> list[PartRow]:
    """Return all parts of a merge, in the order of their shards within each phase."""
    p = merge_parts.c
    query = select(merge_parts).where(p.merge_id == merge_id).order_by(p.id)
    return [PartRow(**row) for row in conn.execute(query).mappings()]


def take(
    conn: Connection, owner: str, now: float, lease_s: float, merge_id: int | None = None
) -> PartRow | None:
    """Lease the next part, of the given merge or of any running merge; None if no part is ready.

    A part whose owner was silent for too long may be taken over. Merging begins only after every
    survey is finished.
    """
    p, other = merge_parts.c, merge_parts.alias("other")
    surveying = (
        select(other.c.id)
        .where(other.c.merge_id == p.merge_id, other.c.phase == "survey", other.c.state != "done")
        .exists()
    )
    conditions: list[ColumnElement[bool]] = [JOBS.ready(now), (p.phase == "survey") | ~surveying]
    if merge_id is None:
        conditions.append(exists().where(merges.c.id == p.merge_id, merges.c.state == "leased"))
    else:
        conditions.append(p.merge_id == merge_id)
    candidates = select(merge_parts).where(*conditions).order_by(p.id)
    return JOBS.take(conn, candidates, owner, now + lease_s)


def finish(conn: Connection, part: PartRow, result_part: MergedPart) -> bool:
    """Mark a part done; return False if another process has it, or the merge has ended."""
    result = msgspec.json.encode(result_part).decode()
    return JOBS.change(conn, part, state="done", result=result)


def fail(conn: Connection, part: PartRow, message: str, *, content: bool) -> None:
    """Fail a part for content that cannot be merged; after a fault of disk or network it gets a
    second try.
    """
    failures = part.failures + 1
    if content or failures >= FAILURES_MAX:
        JOBS.change(conn, part, state="failed", failures=failures, message=message)
    else:
        JOBS.release(conn, part, failures=failures, message=message)


def made_by(part: PartRow) -> MergedPart:
    """Return the result of a finished part."""
    return decode(part.result, MergedPart)


def files_of(rows: Sequence[PartRow]) -> list[str]:
    """Return the weights and surveys of finished parts; no other rows refer to them."""
    return [made_by(row).sha256 for row in rows if row.state == "done"]


def blobs_in_use(conn: Connection) -> set[str]:
    """Return the files made by running merges, and the files of every stored state."""
    rows = conn.execute(select(merge_parts).where(merge_parts.c.state == "done")).mappings()
    hashes = set(conn.execute(select(state_parts.c.sha256)).scalars())
    for part_files in (made_by(PartRow(**row)) for row in rows):
        hashes |= {part_files.sha256, part_files.state_sha256} - {""}
    return hashes


def drop_old(conn: Connection, before: float) -> None:
    """Delete the parts of merges whose lease ended before an instant."""
    old = exists().where(merges.c.id == merge_parts.c.merge_id, merges.c.lease_until < before)
    conn.execute(deletion(merge_parts, "expired").where(old))


# --- states in shards ---


def add_state(conn: Connection, state_sha256: str, files: Sequence[StateFile]) -> None:
    """Insert the list of a state's files; an equal list is the same state."""
    shards = select(state_parts.c.shard).where(state_parts.c.state_sha256 == state_sha256).limit(1)
    if files and conn.execute(shards).first() is None:
        rows = [{"state_sha256": state_sha256, **file._asdict()} for file in files]
        conn.execute(insert(state_parts), rows)


def state_files(conn: Connection, state_sha256: str | None) -> tuple[str, ...]:
    """Return the files of a version's state: no file, one file, or one for each shard."""
    if not state_sha256:
        return ()
    s = state_parts.c
    query = select(s.sha256).where(s.state_sha256 == state_sha256).order_by(s.shard)
    return tuple(conn.execute(query).scalars()) or (state_sha256,)


def drop_states(conn: Connection, used: set[str]) -> None:
    """Delete the lists of states that no kept version refers to."""
    noted = set(conn.execute(select(state_parts.c.state_sha256).distinct()).scalars())
    unused = sorted(noted - used)
    if unused:
        conn.execute(deletion(state_parts, "let go").where(state_parts.c.state_sha256.in_(unused)))
