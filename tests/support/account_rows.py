"""Rows for tests of volunteers and the ledger: a run, machines, contributions in any state."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from sqlalchemy import Connection, insert, select

from coordinator.accounts.accounts import Principal, Volunteers
from coordinator.database.engine.open_database import Database
from coordinator.database.ledger import payments
from coordinator.database.ledger.ledger_check import check_ledger
from coordinator.database.ledger.payments import Payment
from coordinator.database.tables.accounts import workers
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.runs import runs
from coordinator.database.tables.tasks import tasks
from coordinator.rules import run_file
from shared.protocol.accounts import RegisterRequest

OTHER = "another-" + "0123456789abcdef" * 2  # the secret of somebody else
SECRET = "s3cret-" + "0123456789abcdef" * 2
_numbers = itertools.count(1)


def newcomer(name: str, machine: int = 1, **other: object) -> RegisterRequest:
    """Return the first request of a client; the same name and machine give the same ids."""
    values: dict[str, object] = {
        "volunteer_id": f"volunteer-{name.lower():_<16.16}",
        "worker_id": f"worker-{name.lower():_<16.16}-{machine}",
        "secret": SECRET,
        "nickname": name,
    }
    return RegisterRequest(**{**values, **other})  # type: ignore[arg-type]


TINY = {"vocab_size": 64, "block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 8}


def add_run(conn: Connection, name: str = "alpha", licence: str = "CC0-1.0") -> int:
    """A running run of a tiny model."""
    table = {"name": name, "workload": "gpt", "licence": licence, "model": TINY}
    file = run_file.from_table(table)
    numbers = dict.fromkeys(("seed", "global_step", "tokens", "parameters", "pass_no"), 0)
    numbers |= dict.fromkeys(("cursor", "samples_total", "sample_size"), 0)
    row = insert(runs).values(
        name=name,
        state="running",
        file=run_file.encode(file),
        workload="gpt",
        workload_version=1,
        head=0,
        samples_per_chunk="[]",
        step_flops=1.0,
        price_micro=1,
        weight=1.0,
        created_at=0.0,
        **numbers,
    )
    return int(conn.execute(row.returning(runs.c.id)).scalar_one())


def add_machine(conn: Connection, volunteer_id: str) -> str:
    """The first machine of an account."""
    query = select(workers.c.id).where(workers.c.volunteer_id == volunteer_id).limit(1)
    return str(conn.execute(query).scalar_one())


def add_task(conn: Connection, run_id: int, state: str = "done", **other: object) -> int:
    """A task of ten steps."""
    values: dict[str, object] = {
        "run_id": run_id,
        "kind": "train",
        "pass_no": 0,
        "start": 0,
        "stop": 10,
        "seed": 0,
        "steps": 10,
        "batch_size": 1,
        "price_micro": 10,
        "state": state,
        "attempt": 1,
        "device": "cpu",
        "returned": False,
        "failures": 0,
        "timeouts": 0,
        "options": "{}",
        **other,
    }
    return int(conn.execute(insert(tasks).values(**values).returning(tasks.c.id)).scalar_one())


def add_contribution(
    conn: Connection,
    run_id: int,
    volunteer_id: str,
    state: str = "accepted",
    price_micro: int = 10,
    **other: object,
) -> int:
    """A contribution to a task of its own, decided when it came."""
    number = next(_numbers)
    values: dict[str, object] = {
        "run_id": run_id,
        "task_id": add_task(conn, run_id),
        "attempt": 1,
        "part": 0,
        "tries": 0,
        "worker_id": "worker-of-" + volunteer_id[-20:],
        "volunteer_id": volunteer_id,
        "digest": f"{number:064x}",
        "kind": "delta",
        "codec": "float32",
        "sha256": f"{number:064x}",
        "size": 1,
        "base_version": 0,
        "steps": 10,
        "samples": 10,
        "price_micro": price_micro,
        "train_s": 2.5,
        "clip": 1.0,
        "state": state,
        "reason": "",
        "message": "",
        "report": "{}",
        "received_at": 0.0,
        "decided_at": 0.0,
        **other,
    }
    row = insert(contributions).values(**values).returning(contributions.c.id)
    return int(conn.execute(row).scalar_one())


async def join(people: Volunteers, name: str, machine: int = 1, **other: object) -> Principal:
    """Register a machine and authenticate it."""
    request = newcomer(name, machine, **other)
    await people.register(request)
    return await people.authenticate(request.worker_id, request.secret)


# --- money ---


def pay(number: int = 1, amount: int = 100, who: str = "volunteer-mia-000001") -> Payment:
    """Return the payment for a contribution."""
    return Payment(volunteer_id=who, contribution_id=number, run_id=1, amount_micro=amount)


def poster(step: payments.Step) -> Callable[..., None]:
    """Return the function that posts one step of contributions."""
    return lambda conn, rows, now, memo="": payments.post_step(conn, step, rows, now, memo)


def earn(conn: Connection, *rows: Payment) -> None:
    """Pay for a contribution as accepted, then as merged."""
    payments.post_step(conn, "pending", rows, 1.0)
    payments.post_step(conn, "earn", rows, 2.0)


async def breaches(db: Database) -> list[str]:
    """Return the breaches that the check of the ledger finds."""
    return await db.read(check_ledger)
