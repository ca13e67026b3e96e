"""The same task in other arithmetic, and cheats beside it: how far honest machines are apart.

    make experiments EXPERIMENT=arithmetic        about an hour of one core; a rerun goes on
    make experiments EXPERIMENT=arithmetic EXPERIMENT_ARGS='--quick'

A task is done in processes that are held to the instructions of other processors, with other
threads and portions of a batch, with factors of 10 bits (TF32) and in bfloat16; each is compared
with each. Beside them, what does not do the task: noise, copies, other data, a part of the work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file

from coordinator.checking.recompute_comparison import likeness_of
from coordinator.rules.draws import Redone
from coordinator.rules.recompute_result import difference as apart
from coordinator.rules.recompute_result import raw_difference
from shared.tensors.codec import CODECS, codec
from shared.tensors.update import Delta
from shared.workloads.base import Job
from tests.experiments.arithmetic import (
    FLOAT32,
    NARROW,
    REFERENCE,
    SUBJECTS,
    Arithmetic,
    Arrays,
    Asked,
    Machines,
    Probe,
    Subject,
    subject,
)
from tests.experiments.arithmetic_report import tables
from tests.experiments.cells import Row, arguments, results, work_off

BASES = ("fresh", "trained")
TRAINED = (300, 1500)  # steps that bases have learnt for
TASKS = {30: 10, 60: 40, 100: 2, 500: 1}  # of each subject and base, by steps
PROBES = {30: (10, 30), 60: (10, 30, 60), 100: (60, 100), 500: (100, 200, 300, 500)}
SHORT, OFTEN = 30, 60
# The arithmetic of many tasks of 60 steps, in float32 alone, and of long ones.
MANY = ("avx512", "avx512, 2 threads, portions", "avx2", "sse", "no oneDNN", "nudged")
FEW = ("avx512", "avx2", "no oneDNN", "tf32", "bf16", "nudged", "bf16, nudged")
HISTORY = 100  # steps of the task before, at most
CODEC_CELL = "codecs | "
OTHER = 10_000  # number of a task on other data
# Difference, 1 - cosine, ratio of norms - 1.
Figures = tuple[float, float, float]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One task."""

    subject: str
    base: str
    steps: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.subject} | {self.base} {self.steps} #{self.number}"

    def task(self, about: Subject, number: int | None = None, rate: float = 1.0) -> Job:
        """Return the task, or that of another number, at a factor of its learning rate."""
        number = self.number if number is None else number
        done = 0 if self.base == "fresh" else TRAINED[self.number % 2]
        job = about.task(number, self.steps, rate=rate * self.rate)
        return msgspec.structs.replace(job, global_step=done)

    @property
    def rate(self) -> float:
        """Return the factor of the learning rate: usual, hot or careful."""
        return (1.0, 3.0, 0.3)[self.number % 3]


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a task, and what was handed in before it."""

    base: Arrays
    own: np.ndarray | None = None  # the update before
    merged: np.ndarray | None = None  # all updates of the version before


def cells(most: Mapping[int, int]) -> Iterator[Cell]:
    """Return the tasks, in an order that advances all subjects together."""
    for number in range(max(most.values())):
        for steps, tasks in most.items():
            for base in BASES if number < tasks else ():
                for name in SUBJECTS:
                    yield Cell(subject=name, base=base, steps=steps, number=number)


def difference(mine: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Return how far an update is from ours: length of the difference, 1 - cosine, ratio of norms
    - 1.
    """
    one, two = mine.astype(np.float64), other.astype(np.float64)
    norms = float(np.linalg.norm(one)), float(np.linalg.norm(two))
    if not all(norms):
        return 1.0, 1.0, norms[1] / max(1e-300, norms[0]) - 1
    apart = float(np.linalg.norm(one / norms[0] - two / norms[1]))
    return float(np.linalg.norm(one - two)) / norms[0], apart**2 / 2, norms[1] / norms[0] - 1


def sent(
    about: Subject, base: Arrays, pair: tuple[Probe, Probe], codec_name: str, folder: Path
) -> tuple[float, float]:
    """Return the raw difference of two machines' updates, and what a recompute tells from what they
    send.
    """
    one, other = (Delta(base, probe[1], about.schema) for probe in pair)
    chosen, files = codec(codec_name), [folder / name for name in ("one", "other")]
    for update, file in zip((one, other), files, strict=True):
        chosen.encode(update, about.schema, file, 7)
    with (
        chosen.decode(files[0], about.schema) as own,
        chosen.decode(files[1], about.schema) as theirs,
    ):
        beside = likeness_of(own, theirs, about.schema, "parameter")
        rounded = likeness_of(one, own, about.schema, "parameter")
    redone = Redone(
        cosine=beside.cosine,
        norm_ratio=beside.norm_ratio,
        rounding=apart(rounded.cosine, rounded.norm_ratio),
    )
    raw = likeness_of(one, other, about.schema, "parameter")
    return apart(raw.cosine, raw.norm_ratio), raw_difference(redone)


class Laboratory:
    """Machines, and bases that were made once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._machines = folder, Machines()

    def close(self) -> None:
        self._machines.close()

    def play(self, cell: Cell | str) -> Row:
        """Do a task in all arithmetic; figures of all pairs, and of cheats. Of a subject alone,
        what codecs write.
        """
        if isinstance(cell, str):
            return self.codecs(cell)
        about = subject(cell.subject, str(self._folder))
        past, often = self._past(cell, about), cell.steps == OFTEN
        names = MANY if often else FEW if cell.steps > SHORT else ()
        every = [one for one in (*FLOAT32, *NARROW) if not names or one.name in names]
        job = cell.task(about)
        done = {how.name: self._learn(cell, job, how, past) for how in every}
        row: dict[str, Any] = {"steps": {}}
        for steps in PROBES[cell.steps]:
            found: dict[str, list[Figures]] = {}
            for one, other in combinations(every, 2):
                if (kind := _pair(one, other)) is not None:
                    found.setdefault(kind, []).append(
                        difference(done[one.name][steps][0], done[other.name][steps][0])
                    )
            row["steps"][str(steps)] = found
        if cell.number % 2 == 0 and not often:
            row["cheats"] = self._cheats(cell, about, past, done[REFERENCE.name])
        return row

    def codecs(self, name: str) -> Row:
        """Compare what codecs write, three tasks in a row; the most of each codec."""
        about, row = subject(name, str(self._folder)), dict[str, Any]()
        with tempfile.TemporaryDirectory() as folder:
            for number in range(3):
                cell = Cell(subject=name, base="fresh", steps=SHORT, number=number)
                past, job = self._past(cell, about), cell.task(about)
                one, other = (
                    self._learn(cell, job, how, past)[SHORT] for how in (REFERENCE, FLOAT32[1])
                )
                for codec_name in CODECS:
                    figures = sent(about, past.base, (one, other), codec_name, Path(folder))
                    before = row.get(codec_name, (0.0, 0.0))
                    row[codec_name] = [max(both) for both in zip(before, figures, strict=True)]
        return {"codecs": row}

    def _learn(self, cell: Cell, job: Job, how: Arithmetic, past: Past) -> dict[int, Probe]:
        probes = {*PROBES.get(cell.steps, ()), job.steps}
        if how is REFERENCE:
            probes |= {part for _, part in _parts(job.steps)}
        asked = Asked(
            subject=cell.subject, folder=str(self._folder), job=job, probes=tuple(sorted(probes))
        )
        return self._machines.learn(asked, how, past.base)

    def _past(self, cell: Cell, about: Subject) -> Past:
        if cell.base == "fresh":
            first = about.workload.init(about.model, cell.number)
            return Past(base={name: value.numpy() for name, value in first.items()})
        steps = TRAINED[cell.number % 2]
        path = self._folder / f"{cell.subject} {steps}.safetensors"
        if not path.exists():
            start = about.workload.init(about.model, 0)
            begun = Past(base={name: value.numpy() for name, value in start.items()})
            job = about.task(OTHER, steps)
            plain = msgspec.structs.replace(cell, steps=0)
            save_file(self._learn(plain, job, REFERENCE, begun)[steps][1], path)
        whole = load_file(path)
        past = Past(base=whole)
        steps, plain = min(HISTORY, cell.steps), msgspec.structs.replace(cell, steps=0)
        jobs = [about.task(OTHER + at + cell.number, steps, rate=cell.rate) for at in (1000, 2000)]
        own, other = (self._learn(plain, job, REFERENCE, past)[steps] for job in jobs)
        merged = (own[0] + other[0]) / 2
        one, two = own[1], other[1]
        base = {name: (one[name] + two[name]) / 2 for name in one}
        base = {name: value.astype(one[name].dtype) for name, value in base.items()}
        return Past(base=base, own=own[0], merged=merged)

    def _cheats(
        self, cell: Cell, about: Subject, past: Past, honest: Mapping[int, Probe]
    ) -> dict[str, Figures]:
        """Return what does not do the task, or another, beside it."""
        ours, steps = honest[cell.steps], cell.steps
        noise = np.random.default_rng(cell.number).standard_normal(len(ours[0]))
        given: dict[str, np.ndarray] = {"noise": noise}
        if past.own is not None and past.merged is not None:
            given["own last update"] = past.own
            given["last merge"] = past.merged
        for name, part in _parts(steps):
            given[name] = honest[part][0] * (steps / part)
        jobs = {
            "other data": cell.task(about, OTHER + cell.number),
            "half the rate": cell.task(about, rate=0.5),
            "0.9 of the rate": cell.task(about, rate=0.9),
        }
        hows = dict.fromkeys(jobs, REFERENCE)
        for name, share in () if about.cut_alike else (("half", 0.5), ("a quarter", 0.25)):
            jobs[f"{name} of each batch"] = cell.task(about)
            hows[f"{name} of each batch"] = msgspec.structs.replace(REFERENCE, share=share)
        for name, job in jobs.items():
            given[name] = self._learn(cell, job, hows[name], past)[steps][0]
        longest = float(np.linalg.norm(ours[0]))
        for name in ("noise", "own last update", "last merge"):
            if name in given:
                given[name] = given[name] * (longest / float(np.linalg.norm(given[name])))
        return {name: difference(ours[0], theirs) for name, theirs in given.items()}


def _parts(steps: int) -> list[tuple[str, int]]:
    """Parts of the steps, the first ones, that are sent for the whole, scaled up."""
    shares = (("a fifth of the steps", 0.2), ("half of the steps", 0.5), ("nine tenths", 0.9))
    return [(name, max(1, round(share * steps))) for name, share in shares]


def _pair(one: Arithmetic, other: Arithmetic) -> str | None:
    """Return what is learnt from two machines; None where others say the same."""
    kinds, names = (one.kind, other.kind), {one.name, other.name}
    if one.nudge or other.nudge:
        own = names in ({"avx512", "nudged"}, {"bf16", "bf16, nudged"})
        return f"{other.kind} nudged" if own else None
    if kinds[0] == kinds[1]:
        return kinds[0]
    known = "float32" in kinds and names & {"avx512", "sse"}
    return " and ".join(sorted(kinds)) if known or "float32" not in kinds else None


def main() -> None:
    options = arguments(__doc__ or "")
    laboratory = Laboratory(options.out)
    tasks = {30: 1} if options.quick else TASKS
    listed: dict[str, Cell | str] = {c.name: c for c in cells(tasks)}
    listed |= {f"{CODEC_CELL}{name}": name for name in SUBJECTS}
    done = work_off(options, listed, laboratory.play)
    laboratory.close()
    lines = tables(done)
    results(options).with_name("table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
