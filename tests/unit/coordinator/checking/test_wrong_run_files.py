"""Run files that are wrong in usual ways: whatever is refused of honest work, its recompute blames
the run, so no mistake of an organiser costs a volunteer its standing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from coordinator.checking.case import Case
from coordinator.checking.recompute_comparison import RecomputeFiles, Workbench, redo, result_of
from coordinator.database.runs import UNSTARTED, RunRow
from coordinator.rules import recompute_result, refusals, run_file, validation
from coordinator.rules.draws import Result
from coordinator.rules.validation import Evidence, Judgement
from coordinator.runs.definition import definition
from shared.errors import VolunteerError
from shared.protocol.contributions import SubmitRequest
from shared.tensors.codec import codec
from shared.tensors.frame import FrameWriter
from shared.workloads.data.documents import Document
from shared.workloads.data.local_data import LocalData
from shared.workloads.training.lr_schedule import warmup
from tests.support.workloads import tiny_gpt
from tests.support.workloads.tiny_gpt import Folder

STEPS, BATCH, TOTAL = 3, 4, 300
MODEL = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "dropout": 0.0}
RATES = (1e-30, 1e-12, 1e-7, 1e-3, 0.3, 3.0, 30.0, 1e3, 1e6)
LIMITS = (1e-9, 1.0, 6.0, 6.0)
TASKS = 2  # of each run, whose second may be the same bytes


class Task(NamedTuple):
    """Honest work of a task, as its volunteer submits it."""

    case: Case
    files: RecomputeFiles
    data: LocalData
    loss: float | None


def wrong(rng: random.Random, model: dict[str, Any]) -> dict[str, Any]:
    """Return a run file with a rate, a limit, an optimiser and a precision by chance."""
    train: dict[str, Any] = {"precision": rng.choice(("float32", "float32", "bfloat16"))}
    preset = rng.choice(("fedavg", "fedavg", "gradient-average"))
    if preset == "fedavg":
        train |= {"optimizer": rng.choice(("adamw", "muon", "sgd")), "lr": rng.choice(RATES)}
        train |= {
            "clip_norm": rng.choice((0.0, 1e-9, 1.0, 1e9)),
            "warmup_steps": rng.choice((0, 100)),
            "weight_decay": rng.choice((0.0, 0.1, 1e3)),
            "min_lr_ratio": rng.choice((0.0, 0.1)),
            "decay_steps": rng.choice((0, 1)),
        }
    limits = {"loss_limit": rng.choice((0.01, 1.0, 3.0, 3.0)), "norm_limit": rng.choice(LIMITS)}
    return {
        "name": "wrong",
        "workload": "gpt",
        "dataset": "sums",
        "model": model,
        "train": train,
        "task": {"local_steps": STEPS, "batch_size": BATCH, "min_steps": 1},
        "plan": {"preset": preset, "codec": rng.choice(("float32", "int8", "int4"))},
        "validation": limits | {"norm_room": rng.choice(LIMITS)},
    }


def run_of(table: dict[str, Any]) -> RunRow:
    """Return a run of a file. Raises VolunteerError for one that no run is made of."""
    file = run_file.from_table(table)
    names = ("seed", "parameters", "samples_total", "sample_size", "weight", "created_at")
    values: dict[str, Any] = dict.fromkeys((*names, "step_flops"), 0) | UNSTARTED
    values |= {"id": 1, "name": "wrong", "state": "running", "file": run_file.encode(file)}
    values |= {"workload": "gpt", "workload_version": 1, "dataset_id": 1, "head": 0}
    values |= {"samples_per_chunk": "[]", "price_micro": 1, "started_at": 0.0, "ended_at": None}
    row = RunRow(**values)
    definition(row)
    return row


def tasks(run: RunRow, folder: Path, data: Folder) -> Iterator[Task | None]:
    """Do the first tasks of a run; None for one that its volunteer can only give back."""
    about, weights = definition(run), folder / "weights"
    with FrameWriter(weights, about.schema, sync=False) as writer:
        model = about.workload.init(about.file.model, 1)
        for spec in about.schema:
            writer.write(spec.name, model[spec.name].numpy().ravel())
    names = [ref.sha256 for ref in (*data.manifest.chunks, *data.manifest.assets.values())]
    local = LocalData(data.manifest, {name: data.path / name for name in names})
    train = msgspec.structs.replace(
        about.file.train, warmup_steps=warmup(about.file.train, about.file.train.decay_steps)
    )
    for number in range(TASKS):
        start = number * STEPS * BATCH
        span = {"start": start, "stop": start + STEPS * BATCH, "seed": 11 + number}
        job = tiny_gpt.job(about.file.model, STEPS, BATCH, train=train, total_steps=TOTAL, **span)
        job = msgspec.structs.replace(job, update=about.plan.update)
        chunks = tuple(range(len(data.manifest.chunks)))
        case = Case(
            run=run, manifest=data.manifest, job=job, base_sha256="", chunks=chunks, device="cpu"
        )
        path = folder / f"update-{number}"
        try:
            report, update = result_of(Workbench(stop=lambda: False), case, weights, local)
            codec(about.plan.codec).encode(update, about.schema, path, job.seed)
        except VolunteerError:  # the training diverges
            yield None
            continue
        files = RecomputeFiles(weights=weights, update=path, codec=about.plan.codec)
        yield Task(case, files, local, report.loss_last)


def judged(task: Task, cohort: list[float], before: set[bytes]) -> Judgement:
    """Return the verdict on a task before it is done again."""
    about, job = definition(task.case.run), task.case.job
    submission = SubmitRequest(
        attempt=1, base_version=0, codec=task.files.codec, sha256="0" * 64, size=1,
        steps=job.steps, samples=job.stop - job.start, loss_first=task.loss, loss_last=task.loss,
    )  # fmt: skip
    submitted = task.files.update.read_bytes()
    evidence = Evidence(
        submit=submission,
        measurement=validation.measure(task.files.update, about.schema, task.files.codec),
        task_steps=job.steps,
        task_samples=job.stop - job.start,
        head=0,
        base_version=0,
        effort=validation.effort(job.update, job.train, 0, job.steps, TOTAL),
        cohort=cohort,
        loss=5.7,
        parameters=about.parameters,
        replayed=submitted in before,
    )
    before.add(submitted)
    return validation.judge(evidence, about.file.validation, about.file.train, about.plan)


def redone(task: Task, refusal: str) -> Result:
    """Return the result of doing a task again."""
    figures = redo(lambda: False, task.case, task.files, task.data)
    precision = task.case.job.train.precision
    result = recompute_result.judge(figures, precision, comparable=True)
    assert recompute_result.share(figures, precision, comparable=True) == 1.0
    right = refusals.repeats(refusal, task.loss, figures.loss)
    return "unproven" if result == "passed" and not right else result


def texts(path: Path) -> list[Folder]:
    """Data of a usual size, of a few lines, and of one letter."""
    folders = []
    for number, documents in enumerate((40, 1)):
        (path / str(number)).mkdir()
        folders.append(tiny_gpt.sums(path / str(number), documents))
    (path / "letter").mkdir()
    letters = [Document(str(n), "a" * (3000 + n)) for n in range(3)]
    folders.append(tiny_gpt.built(path / "letter", letters))
    return folders


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_no_honest_volunteer_is_blamed_for_a_wrong_run_file(tmp_path: Path, count: int) -> None:
    torch.set_num_threads(1)
    rng, ends = random.Random(50), Counter[str]()
    folders = texts(tmp_path)
    while ends["run files"] < count:
        data = rng.choice(folders)
        try:
            run = run_of(wrong(rng, tiny_gpt.WORKLOAD.config(MODEL, data.manifest)))
        except VolunteerError:
            ends["no run"] += 1
            continue
        ends["run files"] += 1
        cohort = rng.choice(([], [1e-6] * 8, [1e6] * 8))
        before: set[bytes] = set()
        for task in tasks(run, tmp_path, data):
            if task is None:
                ends["given back"] += 1
                continue
            verdict = judged(task, cohort, before)
            assert verdict.state == "accepted" or refusals.is_question(verdict.reason), verdict
            refusal = verdict.reason if verdict.state == "rejected" else ""
            assert redone(task, refusal) == "passed", (run.file, verdict)
            ends[refusal or "accepted"] += 1
    assert ends["accepted"] > 0
    assert sum(ends[reason] for reason in refusals.ADVICE) > count // 4, ends
