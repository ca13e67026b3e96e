"""Verification that answers were written by the named version with the seeds of their task.

One pass over problem and answer gives the distribution that each token was drawn from. The token
must have the log-probability that the record says, and lie where the seed's number for its place
falls. Answers of other weights, another temperature, or chosen among several differ nearly
everywhere. The checker chooses which answers of each group are read, after the file came in: one
where answers are long, more where they are short. Of a drawn task all are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shared.tensors.frame import open_frame
from shared.workloads.base import Job
from shared.workloads.gpt.config import schema
from shared.workloads.gpt.model import build
from shared.workloads.rollouts.answer_proof import faults, refuted
from shared.workloads.rollouts.answer_records import LOWEST, STEPS, GroupRecord
from shared.workloads.rollouts.byte_policy import Rows
from shared.workloads.rollouts.config import (
    Problems,
    RolloutsConfig,
    RolloutsOptions,
    answer_seed,
)
from shared.workloads.rollouts.problems import encoded

BATCH = 64  # answers read together
TOKENS = 32  # of each group are read at least: three faulty ones prove nothing


class Reread(NamedTuple):
    """Result of reading answers again: complaints by place, tokens read, and faulty tokens."""

    complaints: dict[int, str]
    read: int
    faults: int


def differing(
    records: Mapping[int, GroupRecord],
    job: Job,
    file: Callable[[int | str], Path],
    secret: int,
    *,
    whole: bool,
) -> Reread:
    """Read some answers again, and complain of records that their version did not write."""
    problems = Problems.of(RolloutsConfig.from_dict(job.config), file)
    dice = np.random.Generator(np.random.Philox(secret))
    spots: dict[int, list[tuple[int, int]]] = {}
    for place, record in records.items():
        samples = range(len(record.lengths)) if whole else _some(record.lengths, dice)
        spots.setdefault(record.version, []).extend((place, sample) for sample in samples)
    seen: dict[int, list[tuple[int, int]]] = {}  # faulty tokens of each answer, and all of them
    for version, some in spots.items():
        reader = Rereader(job, file(version), problems)
        for start in range(0, len(some), BATCH):
            batch = some[start : start + BATCH]
            counts = reader.faulty([(records[place], sample) for place, sample in batch])
            for (place, sample), count in zip(batch, counts, strict=True):
                seen.setdefault(place, []).append((count, records[place].lengths[sample]))
    # Few tokens alone prove little: if all together are refuted, so is each group with a fault.
    groups = {place: _sum(answers) for place, answers in seen.items()}
    faulty, read = _sum(groups.values())
    all_faulty = refuted(faulty, read)
    complaints = {
        place: f"problem {records[place].problem}: read again by version {records[place].version},"
        f" {count} of {tokens} tokens are not what it writes with its seed"
        for place, (count, tokens) in groups.items()
        if (all_faulty and count) or any(refuted(*each) for each in [(count, tokens), *seen[place]])
    }
    return Reread(complaints, read, faulty)


def _sum(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    given = list(counts)
    return sum(faulty for faulty, _ in given), sum(read for _, read in given)


def _some(lengths: Sequence[int], dice: np.random.Generator) -> list[int]:
    """Return answers of a group by chance: so many that they have `TOKENS` tokens, or all."""
    order = dice.permutation(len(lengths))
    ends = np.cumsum(np.asarray(lengths)[order])
    return [int(each) for each in order[: np.searchsorted(ends, TOKENS) + 1]]


class Rereader:
    """Version that reads answers again."""

    def __init__(self, job: Job, path: Path, problems: Problems) -> None:
        self._job, self._problems = job, problems
        self._config = RolloutsConfig.from_dict(job.config)
        self._temperature = RolloutsOptions.from_dict(job.options).temperature
        frame = open_frame(path, schema(self._config.network), copy_on_write=True)
        held = {name: torch.from_numpy(frame.array(name)) for name in frame}
        self._model = build(self._config.network, held, "cpu").train(False)

    @torch.inference_mode()
    def faulty(self, spots: Sequence[tuple[GroupRecord, int]]) -> list[int]:
        """Return how many tokens of each answer the version does not write with its seed."""
        prompts = [encoded(self._problems.get(record.problem).prompt) for record, _ in spots]
        answers = [record.answers()[sample].tolist() for record, sample in spots]
        rows = Rows(prompts, answers)
        logits = self._model.logits(self._model.hidden(rows.given)).float() / self._temperature
        found = []
        for row, (record, sample) in enumerate(spots):
            first = len(prompts[row]) - 1
            scores = logits[row, first : first + len(answers[row])].numpy()
            said = record.said()[sample]
            seed = answer_seed(self._job.seed, record.problem, sample)
            found.append(int(faults(scores, answers[row], said, seed, _reach(said)).sum()))
        return found


def _reach(said: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return how far written log-probabilities may be from the true ones by their rounding."""
    shares = np.sqrt(-said.astype(np.float64) / LOWEST)
    reach: NDArray[np.float64] = LOWEST * (shares + 1 / STEPS) / STEPS
    return np.where(said <= -LOWEST, np.inf, reach)
