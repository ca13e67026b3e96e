"""Forward checks of gradients and of pictures: what strangers send is measured before its verdict,
and what makes a model worse is not merged, is done again, and ends its account.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.admin.command import Named
from coordinator.admin.runs import show
from coordinator.database.standings import CostOfChecks
from coordinator.rules.standing import PASSED_MIN
from shared.workloads.base import Job, Result, Work, Workload, load
from tests.e2e.server.test_open_run import LEARNING
from tests.e2e.workloads.test_dcgan import RUN, copied
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.selfplay_run import RUN as GAMES
from volunteer.control import events

Tensors = Mapping[str, torch.Tensor]


class Flipped:
    """Hands in the opposite of what a task learnt."""

    def __init__(self, work: Work, job: Job, base: Tensors) -> None:
        self._work, self._job, self._base = work, job, dict(base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def result(self) -> tuple[Result, Tensors]:
        report, tensors = self._work.result()
        learnt = {n: v for n, v in tensors.items() if "running" not in n and "tracked" not in n}
        if self._job.update == "gradient":
            return report, {**tensors, **{n: -v for n, v in learnt.items()}}
        return report, {**tensors, **{n: 2 * self._base[n] - v for n, v in learnt.items()}}


def flipped(name: str) -> Workload:
    workload = load(name)
    begin = workload.begin

    def other(job: Job, weights: Tensors, *more: Any) -> Work:
        return Flipped(begin(job, weights, *more), job, weights)  # type: ignore[return-value]

    workload.begin = other  # type: ignore[method-assign,assignment]
    return workload


async def started(home: LocalCoordinator, workload: str, preset: str) -> str:
    """Start a run that merges every update; its name."""
    if workload == "gpt":
        text = LEARNING.replace('preset = "fedavg"\nquorum = 1', f'preset = "{preset}"')
        await home.start_run(text)
        return "tiny"
    await home.coordinator.datasets.add(copied)
    text = RUN.replace("quorum = 2", f'preset = "{preset}"\nquorum = 2')
    await home.coordinator.runs.create(text)
    await home.coordinator.runs.start("digits")
    return "digits"


async def standing(home: LocalCoordinator, name: str) -> str:
    accounts = (await home.coordinator.volunteers.trust()).accounts
    return next(account.standing for account in accounts if account.nickname == name)


async def costs(home: LocalCoordinator, run: str) -> CostOfChecks:
    found = (await show(home.coordinator, Named(name=run))).checks
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("workload", "preset"),
    [("gpt", "sync-sgd"), ("dcgan", "fedavg"), ("dcgan", "gradient-average")],
)
async def test_strangers_are_vetted_by_honest_work_and_the_opposite_is_not_merged(
    tmp_path: Path, workload: str, preset: str
) -> None:
    settings = {"open": True, "proof_of_work_bits": 1}
    async with local_coordinator(tmp_path / "coordinator", **settings) as home:
        run = await started(home, workload, preset)
        async with home.coordinator.working():
            honest = LocalMachine(tmp_path / "honest", home)
            await honest.join("Ann")
            parts = 8 if preset == "sync-sgd" else 1
            async with honest.working(max_tasks=PASSED_MIN // parts + 2) as process:
                assert await process.ended(120) == 0
            cost = await costs(home, run)
            assert cost.forward.passed > 0
            assert cost.forward.failed == 0
            assert await standing(home, "Ann") == "vetted"
            hostile = LocalMachine(tmp_path / "hostile", home)
            await hostile.join("Eve")
            async with hostile.working(flipped) as process, asyncio.timeout(60):
                while await standing(home, "Eve") != "suspended":  # done again, and not the same
                    await asyncio.sleep(0.02)
                verdicts = [event.verdict for event in process.all(events.Judged)]
            assert {verdict.state for verdict in verdicts} <= {"superseded", "rejected"}
            assert (await costs(home, run)).forward.failed >= 1
        assert await home.coordinator.ledger.check() == ()


async def test_a_doubted_update_is_done_again_though_no_recompute_is_drawn(tmp_path: Path) -> None:
    """Without a commitment the doubt stayed: unproven, and counted against honest newcomers."""
    settings = {"open": True, "proof_of_work_bits": 1}
    async with local_coordinator(tmp_path / "coordinator", **settings) as home:
        await home.start_run(LEARNING + "[trust]\nrecompute = 0\n")
        async with home.coordinator.working():
            honest = LocalMachine(tmp_path / "honest", home)
            await honest.join("Ann")
            async with honest.working(max_tasks=PASSED_MIN) as process:
                assert await process.ended(120) == 0
            hostile = LocalMachine(tmp_path / "hostile", home)
            await hostile.join("Eve")
            async with hostile.working(flipped), asyncio.timeout(60):
                while await standing(home, "Eve") != "suspended":
                    assert not (await costs(home, "tiny")).recompute.unproven
                    await asyncio.sleep(0.02)


async def test_learners_of_games_are_measured_and_done_again_like_others(tmp_path: Path) -> None:
    """A merge there is one learner's, and nothing else stood between a stranger and the model."""
    settings = {"open": True, "proof_of_work_bits": 1}
    async with local_coordinator(tmp_path / "coordinator", **settings) as home:
        quick = GAMES.replace("simulations = 16", "simulations = 8")
        await home.coordinator.runs.create(quick + "[trust]\nforward = 1.0\nrecompute = 1.0\n")
        await home.coordinator.runs.start("gomoku")
        async with home.coordinator.working():
            honest = LocalMachine(tmp_path / "honest", home)
            await honest.join("Ann")
            async with honest.working(max_tasks=PASSED_MIN) as process:  # leaves no task behind
                assert await process.ended(120) == 0
            cost = await costs(home, "gomoku")
            assert cost.forward.passed > 0
            assert cost.recompute.passed > 0
            assert cost.recompute.failed == cost.recompute.unproven == 0
            hostile = LocalMachine(tmp_path / "hostile", home)
            await hostile.join("Eve")
            async with hostile.working(flipped), asyncio.timeout(60):
                while await standing(home, "Eve") != "suspended":
                    await asyncio.sleep(0.02)
