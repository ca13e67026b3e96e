"""Task on several ranks: the update of one device, also where a rank dies, pauses or stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from time import sleep
from typing import cast

import psutil
import pytest

from shared.workloads.base import Job
from shared.workloads.training.ranks import Ranks
from shared.workloads.training.step_loop import StepWork
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, close, config, finish, job, sums

pytestmark = pytest.mark.slow


def begin(task: Job, data: Folder, device: str) -> StepWork:
    weights = WORKLOAD.init(task.config, 0)
    return cast(StepWork, WORKLOAD.begin(task, weights, data, device, None))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return sums(tmp_path_factory.mktemp("blobs"))


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(["cpu"] * (getattr(request, "param", 2) - 1))
    yield made
    made.stop()


def spread(task: Job, data: Folder, ranks: Ranks) -> StepWork:
    work = begin(task, data, "cpu")
    work.spread(ranks, partial(begin, task, data))
    return work


def processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_the_update_is_that_of_one_device(data: Folder, ranks: Ranks, update: str) -> None:
    task = job(config(data, dropout=0.1), steps=3, update=update)
    alone, together = begin(task, data, "cpu"), spread(task, data, ranks)
    assert close(finish(together), finish(alone), atol=1e-5)
    one, many = alone.result()[0], together.result()[0]
    assert (many.steps, many.samples) == (one.steps, one.samples)
    assert many.loss_last == pytest.approx(one.loss_last, abs=1e-5)
    again = spread(task, data, ranks)  # the processes go on with the next task
    assert close(finish(again), finish(begin(task, data, "cpu")), atol=1e-5)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_rank_that_dies_costs_its_share_and_not_the_task(data: Folder, ranks: Ranks) -> None:
    task = job(config(data), steps=4)
    work = spread(task, data, ranks)
    work.advance()
    victim, _ = processes()
    os.kill(victim.pid, signal.SIGKILL)
    assert close(finish(work), finish(begin(task, data, "cpu")), atol=1e-5)
    assert len(processes()) == 1


def test_ranks_are_idle_while_rank_0_is(data: Folder, ranks: Ranks) -> None:
    task = job(config(data), steps=4)
    work = spread(task, data, ranks)
    work.advance()
    [rank] = processes()
    before = sum(rank.cpu_times()[:2])
    sleep(1.0)
    assert sum(rank.cpu_times()[:2]) - before <= 0.05
    work.suspend()
    assert processes() == []  # its memory is free
    work.resume()
    assert close(finish(work), finish(begin(task, data, "cpu")), atol=1e-5)


def test_a_pause_within_a_step_holds_every_rank(data: Folder, ranks: Ranks) -> None:
    task = job(config(data, n_embd=64, n_layer=4, block_size=64), steps=2, batch=32)
    work = spread(task, data, ranks)
    used: list[float] = []

    def look() -> None:
        if not used:
            [rank] = processes()
            sleep(0.1)
            before = sum(rank.cpu_times()[:2])
            sleep(0.5)
            used.append(sum(rank.cpu_times()[:2]) - before)

    work.listen(look)
    finish(work)
    assert used[0] <= 0.05
