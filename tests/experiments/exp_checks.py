"""Forward checks: what the figures of honest work are, those of other work, and what the rules make
of both.

make experiments EXPERIMENT=checks                        a rerun goes on
make experiments EXPERIMENT=checks EXPERIMENT_ARGS='--quick'

Ten volunteers train one model, by deltas or by gradients, each version from the work of all of
them; every update of a version is measured, and beside it what a cheat would have sent for the same
task. The measure are the newest passed checks of the ten.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from coordinator.rules import checks
from shared.tensors.quantize import EXACT_CODECS, codec
from shared.workloads.base import Data, ForwardFigures, Job, TrainSettings, Workload, load
from tests.experiments.cells import Row, arguments, results, work_off
from tests.experiments.learning import corpus, local
from tests.support.workloads import tiny_causal, tiny_dcgan

Tensors = Mapping[str, torch.Tensor]
VOLUNTEERS = 10
ROUNDS, ROUNDS_QUICK = {"gpt": 15, "dcgan": 15}, 3
ROUNDS_CAUSAL = 4  # of the library's models, which are slower
KINDS = (
    "honest", "noise", "other data", "sign flip", "x -2.8", "own last again", "one network flipped",
    "half of the steps",
)  # fmt: skip
CODECS = ("int8", "int4", "topk-int4")
GPT = {"block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 48, "dropout": 0.1}
LORA = {"rank": 4, "dropout": 0.1}


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run: `steps` of `batch` samples a task."""

    subject: str
    update: str
    steps: int
    batch: int
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.subject} {self.update} {self.steps} x {self.batch} s{self.seed}"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model and its data."""

    workload: Workload
    model: Mapping[str, Any]
    data: Data
    heldout: Data
    train: TrainSettings
    server_lr: float  # of the optimiser that gradients go to


class Volunteer(msgspec.Struct, kw_only=True):
    """State that a machine keeps from task to task."""

    inner: Tensors | None = None
    last: Tensors | None = None  # what it sent
    residuals: dict[str, Any] = {}  # by codec


class World:
    """Plays one cell."""

    def __init__(self, cell: Cell, subject: Subject, rounds: int) -> None:
        self._cell, self._subject, self._rounds = cell, subject, rounds
        self._schema = subject.workload.schema(subject.model)
        self._learnt = [s.name for s in self._schema if s.role == "parameter"]
        self._rng = np.random.default_rng(cell.seed)
        self._base = dict(subject.workload.init(subject.model, cell.seed))
        parameters = [self._base[name] for name in self._learnt]
        self._adam = torch.optim.Adam(parameters, lr=subject.server_lr, betas=(0.9, 0.95))
        self._given = 0
        self._all = sum(subject.workload.samples(subject.model, subject.data.manifest))
        self._figures: dict[str, list[tuple[float, ...]]] = {}

    def run(self) -> Row:
        crowd = [Volunteer(residuals={}) for _ in range(VOLUNTEERS)]
        for number in range(self._rounds):
            sent = []
            for who, volunteer in enumerate(crowd):
                job = self._job()
                honest = self._work(job, volunteer)
                for kind, update in self._kinds(job, volunteer, honest):
                    self._measure(kind, job, update, number, who)
                volunteer.last = honest
                sent.append(honest)
            self._merge(sent)
        return {"figures": self._figures}

    def _job(self) -> Job:
        """Return the next task of the pass."""
        cell, size = self._cell, self._cell.steps * self._cell.batch
        a_pass = self._all // size
        number, self._given = self._given, self._given + 1
        start = number % a_pass * size
        return Job(
            run="checked",
            workload=self._subject.workload.name,
            kind="train",
            update=cell.update,  # type: ignore[arg-type]  # of the cells below
            config=dict(self._subject.model),
            train=self._subject.train,
            order_seed=1000 * cell.seed + number // a_pass,
            start=start,
            stop=start + size,
            seed=number,
            steps=cell.steps,
            batch_size=cell.batch,
            global_step=0,
            total_steps=0,
            reset_inner=False,
        )

    def _work(self, job: Job, volunteer: Volunteer, *, keep: bool = True) -> Tensors:
        """Return what honest work hands in."""
        work = self._subject.workload.begin(
            job, self._base, self._subject.data, "cpu", volunteer.inner
        )
        while not work.done:
            work.advance()
        done = work.result()[1]
        if keep:
            volunteer.inner = dict(work.state())
        if job.update == "gradient":
            return done
        return {
            name: self._base[name] - value if name in self._learnt else value
            for name, value in done.items()
        }

    def _kinds(
        self, job: Job, volunteer: Volunteer, honest: Tensors
    ) -> Iterator[tuple[str, Tensors]]:
        yield "honest", honest
        for name in CODECS:
            yield f"honest, {name}", self._written(name, honest, volunteer)
        yield "noise", self._changed(honest, lambda _, v: self._noise(v), self._norm(honest))
        yield "other data", self._elsewhere(job, volunteer)
        yield "sign flip", self._changed(honest, lambda _, v: -v)
        yield "x -2.8", self._changed(honest, lambda _, v: -2.8 * v)
        if volunteer.last is not None:
            yield "own last again", volunteer.last
        if self._cell.subject == "dcgan":
            yield (
                "one network flipped",
                self._changed(honest, lambda name, v: -v if name.startswith("generator") else v),
            )
        if job.update == "delta":
            half = max(1, job.steps // 2)
            stop = job.start + half * job.batch_size
            part = msgspec.structs.replace(job, steps=half, stop=stop)
            done = self._work(part, volunteer, keep=False)
            yield "half of the steps", self._changed(done, lambda _, v: v, self._norm(honest))

    def _elsewhere(self, job: Job, volunteer: Volunteer) -> Tensors:
        size = job.stop - job.start
        start = (job.start + self._all // size // 2 * size) % (self._all // size * size)
        other = msgspec.structs.replace(job, start=start, stop=start + size)
        return self._work(other, volunteer, keep=False)

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self._rng.normal(size=tuple(like.shape)).astype(np.float32))

    def _norm(self, update: Tensors) -> float:
        return float(sum(float(update[n].double().square().sum()) for n in self._learnt) ** 0.5)

    def _changed(
        self,
        update: Tensors,
        change: Callable[[str, torch.Tensor], torch.Tensor],
        norm: float = 0.0,
    ) -> Tensors:
        """Change the parameters, to a norm if one is given; buffers stay."""
        made = {n: change(n, v) if n in self._learnt else v for n, v in update.items()}
        factor = norm / self._norm(made) if norm else 1.0
        return {n: v * factor if n in self._learnt else v for n, v in made.items()}

    def _written(self, name: str, update: Tensors, volunteer: Volunteer) -> Tensors:
        """The update as a codec writes it, with what it carries over."""
        chosen, schema = codec(name), self._schema
        arrays: Any = {n: v.numpy() for n, v in update.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "update"
            before = None if name in EXACT_CODECS else volunteer.residuals.get(name, {})
            left = chosen.encode(arrays, schema, path, before).residual or {}
            volunteer.residuals[name] = {k: np.array(v) for k, v in left.items()}
            with chosen.decode(path, schema) as found:
                return {
                    s.name: torch.from_numpy(found[s.name].copy()).reshape(s.shape) for s in schema
                }

    def _measure(self, kind: str, job: Job, update: Tensors, number: int, who: int) -> None:
        given = update
        if job.update == "delta":
            given = {n: self._base[n] - v if n in self._learnt else v for n, v in update.items()}
        data = self._subject.data, self._subject.heldout
        seed = number * VOLUNTEERS + who
        found = self._subject.workload.check(job, self._base, given, data, seed)
        assert found is not None
        row = (number, who, found.drop, found.gap, found.noise, float(found.whole))
        self._figures.setdefault(kind, []).append(tuple(round(x, 7) for x in row))

    def _merge(self, sent: Sequence[Tensors]) -> None:
        mean = {n: torch.stack([u[n].double() for u in sent]).mean(0) for n in self._base}
        for name, value in self._base.items():
            if name not in self._learnt:
                value.copy_(mean[name].to(value.dtype))
            elif self._cell.update == "delta":
                value.sub_(mean[name].float())
            else:
                value.grad = mean[name].float()
        if self._cell.update == "gradient":
            self._adam.step()


def judged(figures: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, dict[str, int]]:
    """Judge every update as a server would whose measure are the honest ones."""
    peers: dict[int, ForwardFigures] = {}
    counts: dict[str, dict[str, int]] = {}
    by: dict[tuple[int, int], list[tuple[str, ForwardFigures]]] = {}
    for kind, rows in figures.items():
        for number, who, drop, gap, noise, whole in rows:
            found = ForwardFigures(drop=drop, gap=gap, noise=noise, whole=bool(whole))
            by.setdefault((int(number), int(who)), []).append((kind, found))
    for number, who in sorted(by):
        for kind, found in by[number, who]:
            name = kind.partition(", ")[2] or "float32"
            result = checks.judge_forward(found, list(peers.values()), name)
            of = counts.setdefault(kind, {})
            of[result] = of.get(result, 0) + 1
            if kind == "honest" and result == "passed":
                peers[who] = found
    return counts


def subject_of(name: str, folder: Path, documents: int) -> Subject:
    """Make the model and the data of a cell."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == "dcgan":
        digits = tiny_dcgan.digits(folder)
        train = msgspec.structs.replace(tiny_dcgan.ADAM, lr=1e-3)
        return Subject(
            workload=tiny_dcgan.WORKLOAD,
            model=tiny_dcgan.config(digits),
            data=digits,
            heldout=digits.heldout(),
            train=train,
            server_lr=1e-3,
        )
    text = corpus(folder.parent.parent, documents)
    workload = load("gpt" if name == "gpt" else "causal-lm")
    table: dict[str, Any] = dict(GPT)
    if name == "causal-lm":
        table = tiny_causal.table(tiny_causal.QWEN2)
    elif name == "causal-lm, adapters":
        table = tiny_causal.table(tiny_causal.QWEN2, train="lora", lora=LORA)
    return Subject(
        workload=workload,
        model=workload.config(table, text[0]),
        data=local(text, text[0].chunks),
        heldout=local(text, text[0].heldout),
        train=TrainSettings(lr=3e-3, warmup_steps=0),
        server_lr=3e-3,
    )


def cells() -> Iterator[Cell]:
    for subject in ("gpt", "dcgan"):
        batch = 16 if subject == "dcgan" else 4
        yield Cell(subject=subject, update="delta", steps=10, batch=batch)
        yield Cell(subject=subject, update="gradient", steps=10, batch=batch)
        yield Cell(subject=subject, update="gradient", steps=1, batch=4 * batch)
    for subject in ("causal-lm, adapters", "causal-lm"):
        yield Cell(subject=subject, update="delta", steps=10, batch=4)
        yield Cell(subject=subject, update="gradient", steps=10, batch=4)


def table(done: Mapping[str, Row], listed: Sequence[Cell]) -> list[str]:
    lines = [
        "| updates | work | drop | gap | noise | passed | unclear | failed |",
        "|" + "---|" * 8,
    ]
    for cell in listed:
        figures = done.get(cell.name, {}).get("figures", {})
        counts = judged(figures)
        for kind in (KINDS[0], *(f"honest, {name}" for name in CODECS), *KINDS[1:]):
            if not (rows := figures.get(kind)):
                continue
            drop, gap, noise = (np.array([row[at] for row in rows]) for at in (2, 3, 4))
            shares = " | ".join(
                f"{counts[kind].get(result, 0)}" for result in ("passed", "unclear", "failed")
            )
            lines.append(
                f"| {cell.subject}, {cell.update}s of {cell.steps} x {cell.batch} | {kind} "
                f"| {_spread(drop)} | {_spread(gap)} | {np.median(noise):.2g} | {shares} |"
            )
    return lines


def _spread(values: np.ndarray) -> str:
    low, middle, high = np.quantile(values, (0.01, 0.5, 0.99))
    return f"{middle:.2g} [{low:.2g}, {high:.2g}]"


def main() -> None:
    options = arguments(__doc__ or "")
    listed = list(cells())
    documents = 12 if options.quick else 0

    def play(cell: Cell) -> Row:
        rounds = ROUNDS_QUICK if options.quick else ROUNDS.get(cell.subject, ROUNDS_CAUSAL)
        folder = options.out / "digits" / cell.subject
        return World(cell, subject_of(cell.subject, folder, documents), rounds).run()

    done = work_off(options, {cell.name: cell for cell in listed}, play)
    lines = table(done, listed)
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
