"""The same task in other arithmetic, and cheats beside it: how far honest machines are apart.

    make experiments EXPERIMENT=arithmetic        about an hour of one core; a rerun goes on
    make experiments EXPERIMENT=arithmetic EXPERIMENT_ARGS='--quick'

A task is done in processes that are held to the instructions of other processors, with other
threads and portions of a batch, with factors of 10 bits (TF32) and in bfloat16; each is compared
with each. Beside them, what does not do the task: noise, copies, other data, a part of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import load_file, save_file

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
from tests.experiments.cells import Row, arguments, work_off

BASES = ("fresh", "trained")
TRAINED = (300, 1500)  # steps that bases have learnt for
TASKS = {30: 12, 100: 6, 500: 3}  # of each subject and base, by steps
PROBES = {30: (10, 30), 100: (60, 100), 500: (100, 200, 300, 500)}
LONG = 500
FEW = ("avx512", "avx2", "sse", "mixed", "no oneDNN", "tf32", "bf16", "nnpack")  # of a long task
HISTORY = 100  # steps of the task before, at most
OTHER = 10_000  # number of a task on other data
WEIGHTS = "weights/"
# Difference, 1 - cosine, ratio of norms - 1; of the state 1 - cosine, and ratio of norms - 1.
Figures = tuple[float, float, float, float, float]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One task."""

    subject: str
    base: str
    steps: int
    number: int

    @property
    def name(self) -> str:
        return f"{self.subject} | {self.base} {self.steps} #{self.number}"

    @property
    def rate(self) -> float:
        """Factor of the learning rate: careful, usual, hot."""
        return (1.0, 0.3, 3.0)[self.number % 3]


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a task, and what was handed in before it."""

    base: Arrays
    inner: Arrays | None = None
    own: np.ndarray | None = None  # the update before
    merged: np.ndarray | None = None  # all updates of the version before


def cells(most: Mapping[int, int]) -> Iterator[Cell]:
    """Tasks, so that all subjects go on together."""
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


def beside(ours: Probe, theirs: tuple[np.ndarray, Arrays | None]) -> Figures:
    """Return the figures of a recompute, with the least likeness of a kind of state ("exp_avg"):
    1 - cosine, and how much longer or shorter.
    """
    kinds: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, mine in ours[1].items():
        if not name.startswith(WEIGHTS) and mine.ndim:  # the count of steps is made up at no cost
            other = (theirs[1] or {}).get(name, np.zeros_like(mine))
            kinds.setdefault(name.partition("/")[0], []).append((mine.ravel(), other.ravel()))
    rows = [[np.concatenate(side) for side in zip(*pairs, strict=True)] for pairs in kinds.values()]
    states = [difference(mine, other)[1:] for mine, other in rows]
    apart, longer = (max(abs(state[at]) for state in states) for at in (0, 1))
    return (*difference(ours[0], theirs[0]), apart, longer)


class Laboratory:
    """Machines, and bases that were made once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._machines = folder, Machines()

    def close(self) -> None:
        self._machines.close()

    def play(self, cell: Cell) -> Row:
        """Do a task in all arithmetic; figures of all pairs, and of cheats."""
        about = subject(cell.subject, str(self._folder))
        past, long = self._past(cell, about), cell.steps >= LONG
        every = [one for one in (*FLOAT32, *NARROW) if not long or one.name in FEW]
        job = about.task(cell.number, cell.steps, rate=cell.rate)
        done = {how.name: self._learn(cell, job, how, past) for how in every}
        row: dict[str, Any] = {"steps": {}}
        for steps in PROBES[cell.steps]:
            found: dict[str, list[Figures]] = {}
            for one, other in combinations(every, 2):
                if (kind := _pair(one, other)) is not None:
                    found.setdefault(kind, []).append(
                        beside(done[one.name][steps], done[other.name][steps])
                    )
            row["steps"][str(steps)] = found
        if cell.number % 2 == 0 or long:
            row["cheats"] = self._cheats(cell, about, past, done[REFERENCE.name])
        return row

    def _learn(self, cell: Cell, job: Any, how: Arithmetic, past: Past) -> dict[int, Probe]:
        probes = {*PROBES.get(cell.steps, ()), job.steps}
        if how is REFERENCE:
            probes |= {part for _, part in _parts(job.steps)}
        asked = Asked(
            subject=cell.subject, folder=str(self._folder), job=job, probes=tuple(sorted(probes))
        )
        return self._machines.learn(asked, how, past.base, past.inner)

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
        past = Past(base=_weights(whole), inner=_state(whole))
        steps, plain = min(HISTORY, cell.steps), msgspec.structs.replace(cell, steps=0)
        jobs = [about.task(OTHER + at + cell.number, steps, rate=cell.rate) for at in (1000, 2000)]
        own, other = (self._learn(plain, job, REFERENCE, past)[steps] for job in jobs)
        merged = (own[0] + other[0]) / 2
        one, two = _weights(own[1]), _weights(other[1])
        base = {name: (one[name] + two[name]) / 2 for name in one}
        base = {name: value.astype(one[name].dtype) for name, value in base.items()}
        return Past(base=base, inner=_state(own[1]), own=own[0], merged=merged)

    def _cheats(
        self, cell: Cell, about: Subject, past: Past, honest: Mapping[int, Probe]
    ) -> dict[str, Figures]:
        """Return what does not do the task, or another, beside it."""
        ours, steps = honest[cell.steps], cell.steps
        noise = np.random.default_rng(cell.number).standard_normal(len(ours[0]))
        given: dict[str, tuple[np.ndarray, Arrays | None]] = {"noise": (noise, past.inner)}
        if past.own is not None and past.merged is not None:
            given["own last update"] = past.own, past.inner
            given["last merge"] = past.merged, past.inner
        for name, part in _parts(steps):
            row, state = honest[part]
            given[name] = row * (steps / part), state
        jobs = {
            "other data": about.task(OTHER + cell.number, steps, rate=cell.rate),
            "half the rate": about.task(cell.number, steps, rate=0.5 * cell.rate),
            "0.9 of the rate": about.task(cell.number, steps, rate=0.9 * cell.rate),
        }
        hows = dict.fromkeys(jobs, REFERENCE)
        for name, share in () if about.cut_alike else (("half", 0.5), ("a quarter", 0.25)):
            jobs[f"{name} of each batch"] = about.task(cell.number, steps, rate=cell.rate)
            hows[f"{name} of each batch"] = msgspec.structs.replace(REFERENCE, share=share)
        for name, job in jobs.items():
            given[name] = self._learn(cell, job, hows[name], past)[steps]
        longest = float(np.linalg.norm(ours[0]))
        for name in ("noise", "own last update", "last merge"):
            if name in given:
                row, left = given[name]
                given[name] = row * (longest / float(np.linalg.norm(row))), left
        return {name: beside(ours, theirs) for name, theirs in given.items()}


def _parts(steps: int) -> list[tuple[str, int]]:
    """Parts of the steps, the first ones, that are sent for the whole, scaled up."""
    shares = (("a fifth of the steps", 0.2), ("half of the steps", 0.5), ("nine tenths", 0.9))
    return [(name, max(1, round(share * steps))) for name, share in shares]


def _pair(one: Arithmetic, other: Arithmetic) -> str | None:
    """Return what is learnt from two machines; None where that is known from others."""
    kinds = [one.kind, other.kind]
    if kinds == ["float32", "float32"]:
        return "float32"
    if kinds == ["bfloat16", "bfloat16"]:
        return "bfloat16"
    known = "float32" in kinds and {one.name, other.name} & {"avx512", "sse"}
    return " and ".join(sorted(kinds)) if known or "float32" not in kinds else None


def _weights(whole: Arrays) -> Arrays:
    return {k.removeprefix(WEIGHTS): v for k, v in whole.items() if k.startswith(WEIGHTS)}


def _state(whole: Arrays) -> Arrays:
    return {name: value for name, value in whole.items() if not name.startswith(WEIGHTS)}


def main() -> None:
    options = arguments(__doc__ or "")
    laboratory = Laboratory(options.out)
    tasks = {30: 1} if options.quick else TASKS
    work_off(options, {c.name: c for c in cells(tasks)}, laboratory.play)
    laboratory.close()


if __name__ == "__main__":
    main()
