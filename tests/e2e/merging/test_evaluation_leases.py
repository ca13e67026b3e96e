"""An evaluation is one replica's at a time: nobody measures beside it or writes after it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from coordinator.compute import Compute
from coordinator.database import evaluations
from coordinator.database.evaluations import EvaluationRow
from coordinator.merging.evaluation import Evaluation
from coordinator.services import Coordinator
from tests.support.local_coordinator import LocalCoordinator, local_coordinator

T = TypeVar("T")
LEASE_S = 15.0


async def taken_by_another(coordinator: Coordinator, now: float) -> EvaluationRow | None:
    return await coordinator.db.write(lambda conn: evaluations.take(conn, "another", now, LEASE_S))


async def row(home: LocalCoordinator) -> EvaluationRow:
    return await home.coordinator.db.read(lambda conn: evaluations.evaluation(conn, 1, 0))


async def test_what_another_replica_measures_is_left_to_it_until_it_is_silent(
    tmp_path: Path,
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run()
        evaluation = home.coordinator.evaluation
        assert await taken_by_another(home.coordinator, home.clock.now()) is not None
        assert not await evaluation.evaluate_next()
        assert ((await row(home)).state, (await row(home)).owner) == ("running", "another")
        await home.clock.advance(LEASE_S)
        assert await evaluation.evaluate_next()
        assert ((await row(home)).state, (await row(home)).attempt) == ("done", 2)


class LateCompute(Compute):
    """Computes so long that another replica takes the evaluation over."""

    def __init__(self, coordinator: Coordinator, *, fails: bool) -> None:
        super().__init__("late")
        self._coordinator = coordinator
        self._fails = fails

    @override
    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        later = self._coordinator.clock.now() + 10 * LEASE_S
        assert await taken_by_another(self._coordinator, later) is not None
        if self._fails:
            raise OSError("the disk is gone")
        return await super().run(work, *arguments)


async def test_a_measurement_or_failure_that_comes_too_late_changes_nothing(
    tmp_path: Path,
) -> None:
    for fails in (False, True):
        async with local_coordinator(tmp_path / f"coordinator-{fails}") as home:
            await home.start_run()
            compute = LateCompute(home.coordinator, fails=fails)
            late = Evaluation(home.coordinator, compute)
            assert await late.evaluate_next()
            compute.close()
            now = await row(home)
            assert (now.state, now.owner, now.loss, now.message) == ("running", "another", None, "")
            assert late.outcomes["tiny", "done"] == 0


async def test_a_server_that_stops_leaves_its_evaluation_to_the_next(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run()
        compute = Compute("closed")
        compute.close()
        assert await Evaluation(home.coordinator, compute).evaluate_next()
        assert (await row(home)).state == "waiting"
        assert await home.coordinator.evaluation.evaluate_next()
        assert (await row(home)).state == "done"
