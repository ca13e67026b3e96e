"""Tasks done again: how near honest work comes to itself, and cheats to it.

make experiments EXPERIMENT=recompute                        a rerun goes on
make experiments EXPERIMENT=recompute EXPERIMENT_ARGS='--quick'

A GPT of 0.1 M parameters with dropout learns the standard library; each task goes on with the
optimiser's state that the one before left. The worker computes with other threads and other
micro-batches than the coordinator that does its task again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch

from coordinator.rules import checks
from coordinator.rules.checks import Redone
from coordinator.rules.sizing import pass_seed
from coordinator.simulate.simulation import Dataset
from shared.local_data import LocalData
from shared.tensors.quantize import EXACT_CODECS, codec
from shared.tensors.update import delta
from shared.workloads.base import Job, TrainSettings
from shared.workloads.gpt.workload import GptWorkload
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.exp_learning import SMALL, TINY
from tests.experiments.learning import corpus, local

Tensors = Mapping[str, torch.Tensor]
STEPS, BATCH = 20, 16
CODECS = ("float32", "bf16", "int8", "int4", "topk-int4")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one kind, `tasks` in a row."""

    work: str
    precision: str
    threads: int
    tasks: int

    @property
    def name(self) -> str:
        return f"{self.work} {self.precision} {self.threads} threads"


class Subject:
    """The model and its data."""

    def __init__(self, data: Dataset, model: Mapping[str, float]) -> None:
        self.workload = GptWorkload()
        self.model = self.workload.config({**model, "dropout": 0.1}, data[0])
        self.schema = self.workload.schema(self.model)
        self.data: LocalData = local(data, data[0].chunks)

    def job(self, cell: Cell, start: int, steps: int = STEPS) -> Job:
        train = TrainSettings(lr=3e-3, warmup_steps=0, precision=cell.precision)  # type: ignore[arg-type]
        return Job(
            run="redone",
            workload="gpt",
            kind="train",
            update="delta",
            config=self.model,
            train=train,
            order_seed=pass_seed(0, 1),
            start=start,
            stop=start + steps * BATCH,
            seed=start,
            steps=steps,
            batch_size=BATCH,
            global_step=0,
            total_steps=0,
            reset_inner=False,
        )

    def learn(
        self, job: Job, base: Tensors, inner: Tensors | None, threads: int, halvings: int = 0
    ) -> tuple[Tensors, Tensors]:
        """Return weights and the optimiser's state after a task."""
        torch.set_num_threads(threads)
        work = self.workload.begin(job, base, self.data, "cpu", inner)
        for _ in range(halvings):
            work.halve()
        while not work.done:
            work.advance()
        return work.result()[1], dict(work.state())


def written(
    subject: Subject, base: Tensors, after: Tensors, name: str, residual: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    """Return an update as its codec writes it, in one row, and the residual that it leaves."""
    chosen = codec(name)
    update = delta(_numpy(base), _numpy(after), subject.schema)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update"
        before = None if name in EXACT_CODECS else residual
        left = chosen.encode(update, subject.schema, path, before).residual or {}
        with chosen.decode(path, subject.schema) as found:
            row = np.concatenate([found[spec.name].reshape(-1) for spec in subject.schema])
    return row.astype(np.float64), {key: np.asarray(value) for key, value in left.items()}


def _numpy(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


def _state(ours: Tensors, theirs: Tensors) -> float:
    least = 1.0
    for kind in ("exp_avg/", "exp_avg_sq/"):
        pair = [
            torch.cat([value.double().flatten() for name, value in one.items() if kind in name])
            for one in (ours, theirs)
        ]
        least = min(least, float(torch.nn.functional.cosine_similarity(pair[0], pair[1], dim=0)))
    return least


def play(cell: Cell, subject: Subject) -> Row:
    """Do tasks in a row and each of them again; figures by codec."""
    base: Tensors = subject.workload.init(subject.model, 1)
    inner: Tensors | None = None
    residuals: dict[str, Mapping[str, np.ndarray]] = {name: {} for name in CODECS}
    cosines: dict[str, list[float]] = {name: [] for name in CODECS}
    states, refused = [], 0
    for number in range(cell.tasks):
        job = subject.job(cell, number * STEPS * BATCH)
        after, left = worked(cell, subject, (job, base, inner), number)
        ours, state = subject.learn(job, base, inner, 1)
        states.append(_state(state, left))
        for name in CODECS:
            theirs, residual = written(subject, base, after, name, residuals[name])
            mine, _ = written(subject, base, ours, name, residuals[name])
            norms = float(np.linalg.norm(theirs)), float(np.linalg.norm(mine))
            found = Redone(
                cosine=float(theirs @ mine) / (norms[0] * norms[1]),
                norm_ratio=norms[0] / norms[1],
                state_cosine=states[-1],
            )
            refused += (
                checks.judge_recompute(found, name, cell.precision, comparable=True) != "passed"
            )
            cosines[name].append(found.cosine)
            residuals[name] = residual
        base, inner = ours, state
    least = {name: round(min(values), 5) for name, values in cosines.items()}
    most = {f"{name} most": round(max(values), 5) for name, values in cosines.items()}
    compared = cell.tasks * len(CODECS)
    return least | most | {"state": min(states), "compared": compared, "refused": refused}


def worked(
    cell: Cell, subject: Subject, given: tuple[Job, Tensors, Tensors | None], number: int
) -> tuple[Tensors, Tensors]:
    """Return what a worker of this kind makes of a task."""
    job, base, inner = given
    if cell.work == "honest":
        return subject.learn(job, base, inner, cell.threads, halvings=number % 4)
    if cell.work == "other data":
        other = subject.job(cell, job.start + cell.tasks * STEPS * BATCH)
        return subject.learn(other, base, inner, cell.threads)
    if cell.work == "no state":
        return subject.learn(job, base, None, cell.threads)
    steps = STEPS // 2 if cell.work == "half work" else STEPS - 2
    after, left = subject.learn(subject.job(cell, job.start, steps), base, inner, cell.threads)
    scaled = {
        name: base[name] + (value - base[name]) * (STEPS / steps) for name, value in after.items()
    }
    return scaled, left


def main() -> None:
    options = arguments(__doc__ or "")
    data = corpus(options.out.parent, 12 if options.quick else 0)
    subject = Subject(data, TINY if options.quick else SMALL)
    tasks = 4 if options.quick else 80
    listed = [
        Cell(work="honest", precision=precision, threads=threads, tasks=tasks)
        for precision in ("float32", "bfloat16")
        for threads in (1, 2)
    ]
    listed += [
        Cell(work=work, precision="float32", threads=1, tasks=tasks // 4)
        for work in ("no state", "other data", "half work", "nine tenths")
    ]
    done = work_off(options, {cell.name: cell for cell in listed}, lambda cell: play(cell, subject))
    lines = ["| work | " + " | ".join(CODECS) + " | state | refused |", "|" + "---|" * 8]
    for cell in listed:
        if (row := done.get(cell.name)) is None:
            continue
        end = " most" if cell.work != "honest" else ""
        figures = " | ".join(f"{row[name + end]:.4f}" for name in CODECS)
        lines.append(
            f"| {cell.name} | {figures} | {row['state']:.4f} "
            f"| {row['refused']} of {row['compared']} |"
        )
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
