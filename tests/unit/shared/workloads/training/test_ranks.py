"""Task on several ranks: the update of one device, also where a rank dies, pauses or stops."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator
from functools import partial
from time import monotonic, sleep
from typing import cast

import psutil
import pytest

from shared.workloads.base import Job
from shared.workloads.training.ranks import Ranks
from shared.workloads.training.step_loop import StepWork
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, close, config, finish, job, sums
from volunteer.training.job import Finished, TrainingJob
from volunteer.training.trainer import Trainer

pytestmark = pytest.mark.slow


def begin(task: Job, data: Folder, device: str) -> StepWork:
    weights = WORKLOAD.init(task.config, 0)
    return cast(StepWork, WORKLOAD.begin(task, weights, data, device))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return sums(tmp_path_factory.mktemp("blobs"))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks from a process that has imported PyTorch, which costs each two seconds of CPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tests.support.workloads.tiny_gpt"])
    monkeypatch.setattr("shared.workloads.training.ranks.get_context", lambda kind: context)


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
    """Return the ranks, children of this process or of the one that forks them."""
    found = []
    for child in psutil.Process().children():
        line = " ".join(child.cmdline())
        found += [child] if "spawn_main" in line else []
        found += child.children() if "multiprocessing.forkserver" in line else []
    return [each for each in found if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_the_update_is_that_of_one_device(
    forked: None, data: Folder, ranks: Ranks, update: str
) -> None:
    task = job(config(data, dropout=0.1), steps=3, update=update)
    alone, together = begin(task, data, "cpu"), spread(task, data, ranks)
    assert close(finish(together), finish(alone), atol=1e-5)
    one, many = alone.result()[0], together.result()[0]
    assert (many.steps, many.samples) == (one.steps, one.samples)
    assert many.loss_last == pytest.approx(one.loss_last, abs=1e-5)
    again = spread(task, data, ranks)  # the processes go on with the next task
    assert close(finish(again), finish(begin(task, data, "cpu")), atol=1e-5)


@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_the_state_of_every_rank_follows_that_of_rank_0_to_the_host(
    forked: None, data: Folder, ranks: Ranks, update: str
) -> None:
    task = job(config(data, dropout=0.1), steps=4, update=update)
    work = spread(task, data, ranks)
    work.advance()
    assert work.stream("cpu:0")
    assert close(finish(work), finish(begin(task, data, "cpu")), atol=1e-5)
    assert len(processes()) == 1


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_a_rank_that_dies_costs_its_share_and_not_the_task(
    forked: None, data: Folder, ranks: Ranks
) -> None:
    task = job(config(data), steps=4)
    work = spread(task, data, ranks)
    work.advance()
    victim, _ = processes()
    os.kill(victim.pid, signal.SIGKILL)
    assert close(finish(work), finish(begin(task, data, "cpu")), atol=1e-5)
    assert len(processes()) == 1


def test_a_rank_without_memory_costs_its_share_and_not_the_task(data: Folder, ranks: Ranks) -> None:
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, limits[1]))
    try:
        task = job(config(data, n_embd=64, n_layer=2), steps=3)
        work = spread(task, data, ranks)
        work.advance()
        [rank] = processes()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert rank.rlimit(psutil.RLIMIT_DATA) == (1 << 40, limits[1])  # that of the whole program
    rank.rlimit(psutil.RLIMIT_DATA, (1 << 20, limits[1]))
    assert close(finish(work), finish(begin(task, data, "cpu")), atol=1e-5)
    assert processes() == []


def test_the_share_of_the_time_is_that_of_every_rank(forked: None, data: Folder) -> None:
    task = job(config(data, n_embd=64, n_layer=2), steps=40)
    trainer = Trainer("cpu", threads=1)
    trainer.rank_devices, trainer.share = ("cpu",), 0.2
    seen: list[tuple[float, float]] = []

    def report(_: object) -> None:
        seen.extend((monotonic(), sum(rank.cpu_times()[:2])) for rank in processes())

    def begun() -> StepWork:
        ranks = trainer.ranks()
        assert ranks is not None
        return spread(task, data, ranks)

    given = TrainingJob(
        device="cpu",
        begin=begun,
        finish=lambda done, spent: done.result()[0].steps,
        samples=1,
        report=report,
        halved=lambda micro: None,
    )
    trainer.start()
    try:
        ended = trainer.submit(given).future.result(120)
        assert isinstance(ended, Finished)
    finally:
        assert trainer.close(20.0)
    (began, before), (end, after) = seen[0], seen[-1]
    assert end - began > 1.0
    assert after - before <= 0.3 * (end - began)
    assert processes() == []


def test_ranks_are_idle_while_rank_0_is(forked: None, data: Folder, ranks: Ranks) -> None:
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


def test_a_pause_within_a_step_holds_every_rank(forked: None, data: Folder, ranks: Ranks) -> None:
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
