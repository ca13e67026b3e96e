"""Real processes, real sockets, real training of a tiny GPT; and volunteers that are killed at
named points.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coordinator.database.tables.contributions import contributions as contributions_table
from tests.e2e.conftest import ServedCoordinator
from tests.support.failpoints import kill
from tests.support.forkserver import Child
from tests.support.local_coordinator import RUN
from tests.support.server_process import Process

LIMIT_S = 90.0
LONE = RUN.replace("quorum = 2", "quorum = 1")


@pytest.fixture(params=["sqlite"])
def database_url(tmp_path: Path) -> str:
    """Use the default database alone."""
    return ""


async def lend(served: ServedCoordinator, name: str, *faults: object, tasks: int = 2) -> Child:
    """`volunteer --no-ui` on a machine of its own, which joins by itself."""
    home = served.log.parent / name
    home.mkdir(exist_ok=True)
    async with served.opened() as coordinator:
        link = f"{served.url}/join#key={coordinator.server.link().fingerprint}"
    environment = {f"XDG_{kind}_HOME": str(home) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    argv = ["volunteer", "--no-ui", "--json", "--device", "cpu", "--max-tasks", str(tasks)]
    return await served.fork_server.run(
        argv, home / "log", environment | {"VOLUNTEER_JOIN": link}, faults
    )


async def contributions(served: ServedCoordinator) -> list[Any]:
    async with served.opened() as coordinator:
        query = contributions_table.select()
        return await coordinator.db.read(lambda conn: list(conn.execute(query).mappings()))


async def is_sound(served: ServedCoordinator) -> list[str]:
    async with served.opened() as coordinator:
        report = await coordinator.checks.run()
        return [*report.breaches, *await coordinator.ledger.check()]


@pytest.mark.slow
async def test_two_volunteers_train_one_model(served: ServedCoordinator) -> None:
    await served.start_run()
    await served.serve()
    await served.listening()
    lent = [await lend(served, name) for name in ("ann", "bob")]
    for child in lent:
        assert await child.ended(LIMIT_S) == 0, child.said()[-3000:]
    assert await served.stop() == 0
    async with served.opened() as coordinator:
        run = await coordinator.runs.queries.info("tiny")
    rows = await contributions(served)
    assert run.version >= 1
    assert len({row["volunteer_id"] for row in rows}) == 2
    assert {row["state"] for row in rows} <= {"merged", "accepted"}
    assert all(row["loss_last"] > 1.0 for row in rows)  # of real training: ln 300 is 5.7
    assert await is_sound(served) == []


@pytest.mark.slow
async def test_a_volunteer_killed_at_any_point_hands_in_every_result_once(
    served: ServedCoordinator,
) -> None:
    await served.start_run(LONE)
    await served.serve()
    await served.listening()
    points = [
        kill().before("outbox put"),  # trained
        kill().after("outbox put"),  # safe on disk
        kill().amid("send PUT /uploads"),
        kill().before("send POST /submit"),  # uploaded
        kill().after("send POST /submit"),  # handed in, the answer is lost
        kill().before("outbox drop"),  # answered, not noted
    ]
    for point in points:
        child = await lend(served, "ann", point, tasks=10)
        assert await child.ended(LIMIT_S) == -signal.SIGKILL, child.said()[-3000:]
    child = await lend(served, "ann", tasks=2)
    assert await child.ended(LIMIT_S) == 0, child.said()[-3000:]
    assert await served.stop() == 0
    rows = await contributions(served)
    assert len(rows) >= 2
    assert {row["state"] for row in rows} <= {"merged", "accepted"}
    assert set(Counter(row["task_id"] for row in rows).values()) == {1}
    assert {row["attempt"] for row in rows} == {1}  # no lease was lost on the way
    assert len({row["volunteer_id"] for row in rows}) == 1
    assert list((served.log.parent / "ann").rglob("outbox/*.json")) == []
    assert await is_sound(served) == []


async def test_a_server_that_evaluates_never_loads_torch(served: ServedCoordinator) -> None:
    name = await served.start_run(LONE)
    with Process(Path(served.settings["data_dir"]), "--port", "0") as server:
        async with served.opened() as coordinator, asyncio.timeout(LIMIT_S):
            while (await coordinator.runs.queries.info(name)).loss is None:
                await asyncio.sleep(0.05)
        mapped = Path(f"/proc/{server.child.pid}/maps").read_text(encoding="utf-8")
        assert "sqlite" in mapped or "python" in mapped
        assert "torch" not in mapped
