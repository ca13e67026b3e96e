"""Tasks done again: how near honest work comes to itself, and cheats to it.

make experiments EXPERIMENT=recompute                        a rerun goes on
make experiments EXPERIMENT=recompute EXPERIMENT_ARGS='--quick'

A GPT of 0.1 M parameters with dropout and a Qwen2 learn the standard library, a DCGAN digits; each
task goes on with the optimiser's state that the one before left. The worker computes with other
threads and other micro-batches than the coordinator that does its task again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from coordinator.checking.redo import state_cosine
from coordinator.rules import likeness
from coordinator.rules.checks import Redone
from coordinator.rules.sizing import pass_seed
from shared.tensors.quantize import EXACT_CODECS, codec
from shared.tensors.sketch import drawn, sketch
from shared.tensors.update import delta
from shared.workloads.base import Data, Job, TrainSettings, Workload, load
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.exp_learning import SMALL, TINY
from tests.experiments.learning import corpus, local
from tests.support.workloads import tiny_causal, tiny_dcgan

Tensors = Mapping[str, torch.Tensor]
CODECS = ("float32", "bf16", "int8", "int4", "topk-2bit")
OTHERS = ("causal-lm", "dcgan")
STRETCHES = (32, 128)  # of which the sums of an audit are made
HALVINGS = 4  # by none to three times: a worker that is more and more short of memory


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one kind, `tasks` in a row."""

    work: str
    precision: str
    threads: int
    tasks: int
    subject: str = "gpt"

    @property
    def name(self) -> str:
        return f"{self.subject} {self.work} {self.precision} {self.threads} threads"


class Subject:
    """The model, its data, and the size of a task."""

    def __init__(
        self, model: Mapping[str, Any], workload: Workload, data: Data, train: TrainSettings
    ) -> None:
        self.workload, self.model, self.data, self._train = workload, model, data, train
        self.schema = workload.schema(model)
        self.steps, self.batch = (5, 64) if workload.name == "dcgan" else (20, 16)
        self._pass = sum(workload.samples(model, data.manifest)) // (self.steps * self.batch)

    def job(self, cell: Cell, number: int, steps: int = 0) -> Job:
        """Return the task of a number, or the first steps of it."""
        train = msgspec.structs.replace(self._train, precision=cell.precision)
        pass_number, place = divmod(number, self._pass)
        start = place * self.steps * self.batch
        return Job(
            run="redone",
            workload=self.workload.name,
            kind="train",
            update="delta",
            config=dict(self.model),
            train=train,
            order_seed=pass_seed(0, 1 + pass_number),
            start=start,
            stop=start + (steps or self.steps) * self.batch,
            seed=number,
            steps=steps or self.steps,
            batch_size=self.batch,
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
    """Return the parameters of an update in one row, as a recompute knows them: what its codec
    writes and leaves behind, less the residual it was added to; and what it leaves behind.
    """
    chosen = codec(name)
    update = delta(_numpy(base), _numpy(after), subject.schema)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "update"
        before = None if name in EXACT_CODECS else residual
        left = chosen.encode(update, subject.schema, path, before).residual or {}
        with chosen.decode(path, subject.schema) as found:
            learnt = [spec.name for spec in subject.schema if spec.role == "parameter"]
            row = np.concatenate([found[name].reshape(-1) for name in learnt])
            if left:
                row = row + _row(left, learnt)
            if before:
                row = row - _row(before, learnt)
    return row.astype(np.float64), {key: np.asarray(value) for key, value in left.items()}


def _row(tensors: Mapping[str, np.ndarray], names: list[str]) -> np.ndarray:
    return np.concatenate([np.asarray(tensors[name]).reshape(-1) for name in names])


class Whole:
    """The parameters of an update in one row, read like a file."""

    def __init__(self, subject: Subject, row: np.ndarray) -> None:
        self._row, at = row, 0
        self._first: dict[str, int] = {}
        for spec in subject.schema:
            if spec.role == "parameter":
                self._first[spec.name] = at
                at += spec.count

    def read(self, name: str, start: int, stop: int) -> Any:
        """Elements [start, stop) of a tensor."""
        first = self._first[name]
        return self._row[first + start : first + stop].astype(np.float32)


def audited(
    subject: Subject, rows: tuple[np.ndarray, np.ndarray], number: int, most: int
) -> tuple[float, float]:
    """Return cosine and ratio of norms of the sums that an audit would compare."""
    where = drawn(subject.schema, number.to_bytes(8, "big"), most)
    one, other = (sketch(Whole(subject, row), where).astype(np.float64) for row in rows)
    norms = float(np.linalg.norm(one)), float(np.linalg.norm(other))
    return float(one @ other) / max(1e-300, norms[0] * norms[1]), norms[0] / max(1e-300, norms[1])


def _numpy(tensors: Tensors) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in tensors.items()}


def play(cell: Cell, subject: Subject) -> Row:
    """Do tasks in a row and each of them again; figures by codec."""
    base: Tensors = subject.workload.init(subject.model, 1)
    inner: Tensors | None = None
    residuals: dict[str, Mapping[str, np.ndarray]] = {name: {} for name in CODECS}
    cosines: dict[str, list[float]] = {name: [] for name in CODECS}
    sums: dict[str, list[float]] = {}
    states, refused = [], 0
    for number in range(cell.tasks):
        job = subject.job(cell, number)
        after, left = worked(cell, subject, (job, base, inner), number)
        # As the worker says; only batch norm learns something else.
        again = job
        if cell.work == "honest":
            again = msgspec.structs.replace(job, halved=(0,) * (number % HALVINGS))
        ours, state = subject.learn(again, base, inner, 1)
        states.append(state_cosine(state, left))
        for name in CODECS:
            theirs, residual = written(subject, base, after, name, residuals[name])
            mine, _ = written(subject, base, ours, name, residuals[name])
            norms = float(np.linalg.norm(theirs)), float(np.linalg.norm(mine))
            found = Redone(
                cosine=float(theirs @ mine) / (norms[0] * norms[1]),
                norm_ratio=norms[0] / norms[1],
                state_cosine=states[-1],
            )
            refused += likeness.judge(found, cell.precision, comparable=True) != "passed"
            cosines[name].append(found.cosine)
            for stretches in STRETCHES:
                alike, ratio = audited(subject, (theirs, mine), number, stretches)
                sums.setdefault(f"{name} sums {stretches}", []).append(alike)
                sums.setdefault(f"{name} off {stretches}", []).append(abs(ratio - 1))
            residuals[name] = residual
        base, inner = ours, state
    least = {name: round(min(values), 5) for name, values in cosines.items()}
    most = {f"{name} most": round(max(values), 5) for name, values in cosines.items()}
    for name, values in sums.items():
        least[name], most[f"{name} most"] = round(min(values), 5), round(max(values), 5)
    compared = cell.tasks * len(CODECS)
    return least | most | {"state": min(states), "compared": compared, "refused": refused}


def worked(
    cell: Cell, subject: Subject, given: tuple[Job, Tensors, Tensors | None], number: int
) -> tuple[Tensors, Tensors]:
    """Return what a worker of this kind makes of a task."""
    job, base, inner = given
    if cell.work == "honest":
        return subject.learn(job, base, inner, cell.threads, number % HALVINGS)
    if cell.work == "other data":
        other = subject.job(cell, number + cell.tasks)
        return subject.learn(other, base, inner, cell.threads)
    if cell.work == "no state":
        return subject.learn(job, base, None, cell.threads)
    steps = subject.steps // 2 if cell.work == "half work" else round(0.9 * subject.steps)
    after, left = subject.learn(subject.job(cell, number, steps), base, inner, cell.threads)
    more = subject.steps / steps
    learnt = {spec.name for spec in subject.schema if spec.role == "parameter"}
    scaled = {
        name: base[name] + (value - base[name]) * more if name in learnt else value
        for name, value in after.items()
    }
    return scaled, left


def subject_of(name: str, folder: Path, *, quick: bool) -> Subject:
    """Make the model and the data of a workload."""
    if name == "dcgan":
        (folder / "digits").mkdir(exist_ok=True)
        digits = tiny_dcgan.digits(folder / "digits")
        return Subject(tiny_dcgan.config(digits), tiny_dcgan.WORKLOAD, digits, tiny_dcgan.ADAM)
    data, workload = corpus(folder.parent, 12 if quick else 0), load(name)
    table = {**(TINY if quick else SMALL), "dropout": 0.1}
    if name == "causal-lm":
        table = tiny_causal.table(tiny_causal.QWEN2)
    train = TrainSettings(lr=3e-3, warmup_steps=0)
    return Subject(workload.config(table, data[0]), workload, local(data, data[0].chunks), train)


def cells(tasks: int) -> Iterator[Cell]:
    """Honest work of three workloads, and other work of a GPT."""
    for subject in ("gpt", *OTHERS):
        for precision in ("float32", "bfloat16"):
            for threads in (1, 2):
                many = tasks if subject == "gpt" else tasks // 2
                yield Cell(
                    work="honest", precision=precision, threads=threads, tasks=many, subject=subject
                )
    for subject in ("gpt", *OTHERS):
        for work in ("no state", "other data", "half work", "nine tenths"):
            yield Cell(work=work, precision="float32", threads=1, tasks=tasks // 4, subject=subject)


def main() -> None:
    options = arguments(__doc__ or "")
    listed = list(cells(4 if options.quick else 80))
    made: dict[str, Subject] = {}

    def played(cell: Cell) -> Row:
        if cell.subject not in made:
            made[cell.subject] = subject_of(cell.subject, options.out, quick=options.quick)
        return play(cell, made[cell.subject])

    done = work_off(options, {cell.name: cell for cell in listed}, played)
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
