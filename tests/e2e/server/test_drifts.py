"""Tasks as long as they can be proved: the bound that the server measures, other arithmetic at that
length, and cheats.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tomlkit
import torch

from coordinator.admin.command import NameRequest
from coordinator.admin.runs import show
from coordinator.checking import drifts
from coordinator.checking.case import Case
from coordinator.checking.drifts import FIRST_STEPS, Drifts
from coordinator.checking.recompute_comparison import RecomputeFiles, Workbench, redo, update_of
from coordinator.database import runs, versions
from coordinator.demo.runs import demo_run
from coordinator.rules.draws import Redone
from coordinator.rules.provable_length import DRIFT_SOUGHT, EXTRAPOLATED
from coordinator.rules.recompute_result import DRIFT_MAX, judge, share
from coordinator.runs.definition import definition
from shared.tensors.codec import codec
from shared.tensors.slices import ArrayReader
from shared.workloads.data.local_data import LocalData
from tests.e2e.server.test_recomputes import LEARNING
from tests.support.local_coordinator import LocalCoordinator, local_coordinator

PLANNED = 5000  # steps, which the server would hand out by itself
LONG = (
    LEARNING.format(codec="float32", preset="fedavg", precision="float32")
    .replace("local_steps = 8", f"target_seconds = 60\nmax_steps = {PLANNED}")
    .replace("lr = 0.01", 'optimizer = "{optimizer}"\nlr = {lr}')
)
RUNS = {
    "adamw": LONG.format(optimizer="adamw", lr=0.01),
    "sgd": LONG.format(optimizer="sgd", lr=0.3),
}
# instructions and threads of another processor
ELSEWHERE = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
}
Arrays = dict[str, np.ndarray]


@asynccontextmanager
async def measured(path: Path, text: str) -> AsyncIterator[tuple[LocalCoordinator, int]]:
    """A run, and the most steps of its tasks."""
    async with local_coordinator(path) as home:
        await home.start_run(text)
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        most = await Drifts(home.coordinator, home.coordinator.computing[2]).measure(run)
        assert most is not None
        yield home, most


async def typical(home: LocalCoordinator, steps: int) -> tuple[Case, Path, LocalData]:
    """A task of the run of so many steps, its base and its data."""
    run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
    case = await home.coordinator.db.read(lambda conn: Case.typical(conn, run, steps))
    assert case is not None
    weights = await home.coordinator.blobs.local(case.base_sha256)
    return case, weights, await case.data(home.coordinator.blobs)


def done(case: Case, weights: Path, data: LocalData, threads: int) -> Arrays:
    """Return the update of a task."""
    torch.set_num_threads(threads)
    update = update_of(Workbench(stop=lambda: False), case, weights, data)
    schema = definition(case.run).schema
    return {spec.name: update.read(spec.name, 0, spec.count) for spec in schema}


def elsewhere(case: Case, weights: Path, data: LocalData) -> Arrays:
    """Return the update of a task as another processor computes it."""
    before = dict(os.environ)
    os.environ.update(ELSEWHERE)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(done, case, weights, data, 2).result()
    finally:
        os.environ.clear()
        os.environ.update(before)


def compared(
    folder: Path, task: tuple[Case, Path, LocalData], update: Mapping[str, np.ndarray], name: str
) -> Redone:
    """Return the figures of a recompute of an update that was sent in this codec."""
    case, weights, data = task
    schema, path = definition(case.run).schema, folder / f"update-{name}"
    shaped = {spec.name: update[spec.name].reshape(spec.shape) for spec in schema}
    codec(name).encode(ArrayReader(shaped, schema), schema, path, case.job.seed)
    files = RecomputeFiles(weights=weights, update=path, codec=name)
    return redo(lambda: False, comparable(case), files, data)


def length(update: Mapping[str, np.ndarray]) -> float:
    """Return the length of an update."""
    return float(sum(float((value.astype("f8") ** 2).sum()) for value in update.values()) ** 0.5)


def comparable(case: Case) -> Case:
    """Return a task that was done on a processor."""
    return msgspec.structs.replace(case, device="cpu")


async def test_no_task_is_handed_out_before_its_length_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run(RUNS["sgd"])
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert (run.drift_version, run.head) == (0, 0)
        assert run.drift is not None
        assert 0 < run.drift <= DRIFT_SOUGHT
        assert 0 < run.steps_provable <= EXTRAPOLATED * FIRST_STEPS < PLANNED
        lease = await (await home.join("Ann")).claim()
        assert lease.job.steps <= run.steps_provable
        shown = await show.run(home.coordinator, NameRequest(name="tiny"))
        assert f"at most {run.steps_provable} steps" in shown.drift
        version = await home.coordinator.db.read(lambda conn: versions.get(conn, run.id, 0))
        measured = []
        for steps in (1.9, 2.0):  # a step is done twice
            monkeypatch.setattr(drifts, "FIRST_FLOPS", steps * run.step_flops)
            start = Drifts(home.coordinator, home.coordinator.computing[2])
            measured.append("drift" in await start.first(run, version.published_sha256))
        assert measured == [False, True]


def plain(text: str) -> str:
    """A run file with the defaults of its workload for tasks and steps."""
    table = tomlkit.parse(text).unwrap()
    del table["task"], table["train"]
    return tomlkit.dumps(table)


@pytest.mark.parametrize("file", [str, plain])
async def test_pictures_are_learnt_in_tasks_as_long_as_the_run_file_says(
    tmp_path: Path, file: Callable[[str], str]
) -> None:
    """A task of one step of a GAN is what Adam's first step would leave of a longer one."""
    demo = demo_run("dcgan", 2)
    async with local_coordinator(tmp_path) as home:
        name = await home.start_run(file(demo.toml), demo.build)
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, name))
        assert run.drift_version == 0
        assert run.steps_provable == 0


@pytest.mark.parametrize("optimizer", RUNS)
async def test_a_run_of_long_tasks_hands_out_what_it_can_prove(
    tmp_path: Path, optimizer: str
) -> None:
    async with measured(tmp_path, RUNS[optimizer]) as (home, most):
        run = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert run.drift_version == 0
        assert 1 < most <= PLANNED
        assert run.steps_provable == (most if most < PLANNED else 0)
        lease = await (await home.join("Ann")).claim()
        assert lease.job.steps <= most
        advice = (await show.run(home.coordinator, NameRequest(name="tiny"))).advice
        assert any(f"at most {most} steps" in one for one in advice) is (most < PLANNED)
        again = await home.coordinator.db.read(lambda conn: runs.by_name(conn, "tiny"))
        assert again.steps_provable == run.steps_provable


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd"])
async def test_honest_other_arithmetic_is_paid_and_cheats_fail_at_the_longest_allowed_length(
    tmp_path: Path, optimizer: str
) -> None:
    async with measured(tmp_path, RUNS[optimizer]) as (home, most):
        task = case, weights, data = await typical(home, most)
        honest = await asyncio.to_thread(elsewhere, case, weights, data)
        figures = {}
        for name in ("float32", "int8", "int4"):
            redone = await asyncio.to_thread(compared, tmp_path, task, honest, name)
            assert judge(redone, comparable=True) == "passed", (name, redone)
            figures[name] = share(redone, comparable=False)
        assert figures["float32"] >= 0.95, figures
        part = max(1, case.job.steps // 5)
        lazy = msgspec.structs.replace(
            case,
            job=msgspec.structs.replace(
                case.job, steps=part, stop=case.job.start + part * case.job.batch_size
            ),
        )
        fifth = await asyncio.to_thread(done, lazy, weights, data, 1)
        scaled = {name: value * (case.job.steps / part) for name, value in fifth.items()}
        noise = {
            name: np.random.default_rng(1).standard_normal(v.shape) for name, v in honest.items()
        }
        longer = 0.1 * length(honest) / length(noise)
        poison = {name: (v + longer * noise[name]).astype("f4") for name, v in honest.items()}
        for cheat in (fifth, scaled, poison):
            redone = await asyncio.to_thread(compared, tmp_path, task, cheat, "int8")
            assert judge(redone, comparable=True) == "failed", redone
            assert redone.drift is not None
            assert redone.drift < 2 * DRIFT_SOUGHT < DRIFT_MAX
