"""Runs, volunteers and workers put straight into a database, for tests of their tasks."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, update

from coordinator.accounts.accounts import Principal
from coordinator.attendance import Attendance
from coordinator.database import contributions, passes
from coordinator.database.engine.open_database import Database
from coordinator.database.tables.accounts import volunteers as volunteers_table
from coordinator.database.tables.accounts import workers as workers_table
from coordinator.database.tables.runs import runs as runs_table
from coordinator.database.tables.versions import versions as versions_table
from coordinator.database.tasks import TaskRow
from coordinator.rules import run_file
from coordinator.scheduling.claims import Claims, ClaimTerms
from coordinator.scheduling.renewals import Renewals
from coordinator.scheduling.task_leases import TaskLeases
from coordinator.signals import Signals
from shared.clock import Clock
from shared.protocol.leases import ClaimReply, ClaimRequest
from tests.support.account_rows import TINY

WORKLOAD = "gpt"
_numbers = itertools.count(1)


def add_version(
    conn: Connection,
    run_id: int,
    version: int,
    global_step: int = 0,
    kind: str = "",
    **columns: Any,
) -> None:
    """A version without files, and the head moved to it."""
    row = _version(run_id, version) | {"global_step": global_step} | columns
    conn.execute(insert(versions_table).values(row | {"kind": kind or row["kind"]}))
    moved = update(runs_table).where(runs_table.c.id == run_id)
    conn.execute(moved.values(head=version, global_step=global_step))


def add_versions(conn: Connection, run_id: int, until: int) -> None:
    """Versions 1 to `until` without files, in one statement, and the head moved to the last."""
    conn.execute(insert(versions_table), [_version(run_id, n) for n in range(1, until + 1)])
    conn.execute(update(runs_table).where(runs_table.c.id == run_id).values(head=until))


def _version(run_id: int, version: int) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "version": version,
        "kind": "merge" if version else "initial",
        "parent": version - 1 if version else None,
        "master_sha256": "0" * 64,
        "published_sha256": "0" * 64,
        "size": 1,
        "state_sha256": None,
        "manifest": "{}",
        "signature": "",
        "contributions": "[]",
        "global_step": 0,
        "tokens": 0,
        "update_norm": None,
        "created_at": 0.0,
    }


def add_run(
    conn: Connection,
    name: str = "run",
    *,
    counts: tuple[int, ...] = (64,),
    seed: int = 7,
    step_flops: float = 1e9,
    parameters: int = 1000,
    state: str = "running",
    **table: Any,
) -> int:
    """A run with version 0 and its first pass open; `table` is the rest of its file."""
    shape = TINY if table.get("workload", WORKLOAD) == "gpt" else {}
    file = run_file.from_table({"name": name, "workload": WORKLOAD, "model": shape, **table})
    row = {
        "name": name,
        "state": state,
        "file": run_file.encode(file),
        "workload": file.workload,
        "workload_version": 1,
        "dataset_id": None,
        "seed": seed,
        "head": -1,
        "best": None,
        "global_step": 0,
        "tokens": 0,
        "parameters": parameters,
        "samples_total": sum(counts),
        "samples_per_chunk": msgspec.json.encode(counts).decode(),
        "sample_size": 1,
        "pass_no": 0,
        "cursor": 0,
        "step_flops": step_flops,
        "price_micro": 1000,
        "weight": file.weight,
        "created_at": 0.0,
    }
    run_id = int(
        conn.execute(insert(runs_table).values(**row).returning(runs_table.c.id)).scalar_one()
    )
    add_version(conn, run_id, 0)
    passes.open_pass(conn, run_id)
    return run_id


def add_worker(
    conn: Connection,
    volunteer: str | None = None,
    *,
    step_flops: float = 0.0,
    workloads: tuple[str, ...] = (WORKLOAD,),
) -> Principal:
    """A worker, of a new volunteer unless one is named."""
    number = next(_numbers)
    name = volunteer or f"volunteer-{number}"
    if (
        volunteer is None
        or not conn.execute(
            volunteers_table.select().where(volunteers_table.c.id == volunteer)
        ).first()
    ):
        person = {
            "id": name,
            "nickname": name,
            "nickname_key": name,
            "state": "active",
            "public": True,
        }
        conn.execute(insert(volunteers_table).values(**person, created_at=0.0))
    machine = {"id": f"worker-{number}", "volunteer_id": name, "secret_hash": "", "hostname": ""}
    machine |= {"hardware": "{}", "benchmark": "[]", "software": "", "state": "online"}
    conn.execute(
        insert(workers_table).values(
            **machine,
            step_flops=step_flops,
            workloads=msgspec.json.encode(workloads).decode(),
            last_seen_at=0.0,
            created_at=0.0,
        )
    )
    return Principal(volunteer_id=name, worker_id=f"worker-{number}", nickname=name)


def add_contribution(conn: Connection, task: TaskRow) -> int:
    """Store a contribution as the intake does: it waits for its verdict."""
    made = contributions.add(
        conn,
        [
            {
                "run_id": task.run_id,
                "task_id": task.id,
                "attempt": task.attempt,
                "part": 0,
                "tries": 0,
                "worker_id": task.worker_id,
                "volunteer_id": task.volunteer_id,
                "digest": f"digest-{next(_numbers)}",
                "kind": "delta",
                "codec": "int8",
                "sha256": "0" * 64,
                "size": 1,
                "base_version": task.base_version,
                "steps": task.steps,
                "samples": task.stop - task.start,
                "price_micro": task.price_micro,
                "loss_first": None,
                "loss_last": None,
                "train_s": 0.0,
                "norm": None,
                "clip": 1.0,
                "weight": None,
                "state": "checking",
                "reason": "",
                "message": "",
                "version": None,
                "report": "{}",
                "received_at": 0.0,
                "decided_at": None,
                "merged_at": None,
            }
        ],
        [task.id],
    )
    return made[task.id].id


def queue_of(
    db: Database, clock: Clock, leases_max: int = 64, signals: Signals | None = None
) -> TaskLeases:
    """A queue of its own on a database."""
    signals = signals or Signals(clock)
    renewals = Renewals(db, clock, Attendance(clock))
    claims = Claims(db, clock, signals, renewals, ClaimTerms(leases_max=leases_max))
    return TaskLeases(db, clock, signals, claims, renewals)


async def claim(
    queue: TaskLeases, who: Principal, claim_id: str = "", **request: Any
) -> ClaimReply:
    """One claim that does not wait, unless it says so."""
    asked = ClaimRequest(
        **{
            "claim_id": claim_id or f"claim-{next(_numbers)}",
            "codecs": ("float32", "bf16", "int8"),
            "wait_s": 0.0,
            **request,
        }
    )
    return await queue.claims.claim(who, asked)
