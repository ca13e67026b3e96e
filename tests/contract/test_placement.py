"""Which machine gets a task outside the pass, on SQLite and PostgreSQL, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection

from coordinator.accounts.accounts import Principal
from coordinator.database import tasks
from coordinator.database.engine.open_database import Database
from coordinator.rules.placement import PRESENT_S
from shared.protocol.base import Reason
from tests.support.run_rows import add_run, add_worker, claim
from tests.support.virtual_queue import VirtualQueue, virtual_queue

SLOW, FAST = 1e9, 16e9
LEARN_S = 100  # that a learn task takes the slow one
GOMOKU: dict[str, Any] = {
    "model": {"size": 5, "win": 4, "blocks": 1, "channels": 8},
    "task": {"local_steps": 4, "batch_size": 16, "in_flight": 8, "options": {"games": 4}},
}


@pytest.fixture
async def house(database: Database) -> VirtualQueue:
    """A run of games, and two machines."""
    house = await virtual_queue(database, run=False)

    def write(conn: Connection) -> tuple[int, Principal, Principal]:
        run = add_run(conn, workload="gomoku", counts=(10**6,), parameters=10, **GOMOKU)
        a, b = (add_worker(conn, workloads=("gomoku",)) for _ in range(2))
        return run, a, b

    house.run, house.a, house.b = await house.write(write)
    return house


async def add_learn_task(house: VirtualQueue) -> int:
    values = {
        "run_id": house.run,
        "kind": "learn",
        "start": 0,
        "stop": 64,
        "seed": 1,
        "steps": 16,
        "batch_size": 4,
        "price_micro": LEARN_S // 2 * 1000,
        "options": "{}",
    }

    def write(conn: Connection) -> int:
        return tasks.add_beside(conn, values)

    return await house.write(write)


async def kind(house: VirtualQueue, who: Any, **request: Any) -> str:
    return (await house.lease(who, **request)).job.kind


async def test_the_slow_machine_leaves_a_learn_task_to_the_fast_one(house: VirtualQueue) -> None:
    assert await kind(house, house.b, step_flops=FAST) == "selfplay"  # both are known by now
    assert await kind(house, house.a, step_flops=SLOW) == "selfplay"
    await add_learn_task(house)
    assert await kind(house, house.a, step_flops=SLOW) == "selfplay"
    assert await kind(house, house.b, step_flops=FAST) == "learn"


async def test_the_slow_machine_learns_where_no_fast_one_is_there(house: VirtualQueue) -> None:
    await add_learn_task(house)
    assert await kind(house, house.a, step_flops=SLOW) == "learn"
    assert await kind(house, house.b, step_flops=FAST) == "selfplay"
    await add_learn_task(house)
    await house.clock.advance(PRESENT_S + 1)  # the fast one has not asked since
    assert await kind(house, house.a, step_flops=SLOW) == "learn"


async def test_a_machine_that_was_waited_for_in_vain_keeps_nobody(house: VirtualQueue) -> None:
    while (await claim(house.queue, house.b, step_flops=FAST)).lease:
        pass  # until it holds as many as it may
    await add_learn_task(house)
    only: dict[str, Any] = {"step_flops": SLOW, "kinds": ("learn",)}
    for _ in range(LEARN_S // 20 + 1):
        assert await house.idle(house.a, **only) == Reason.ALL_TAKEN
        await house.clock.advance(19.8)
        assert await house.idle(house.b, step_flops=FAST) == Reason.IN_FLIGHT
    assert await kind(house, house.a, **only) == "learn"


async def test_a_machine_gets_the_kinds_that_it_takes(house: VirtualQueue) -> None:
    task = await add_learn_task(house)
    assert await kind(house, house.a, kinds=("selfplay",)) == "selfplay"
    lease = await house.lease(house.b, kinds=("learn",))
    assert (lease.task, lease.job.kind) == (task, "learn")
    assert await house.idle(house.b, kinds=("train",)) == Reason.NO_FIT
