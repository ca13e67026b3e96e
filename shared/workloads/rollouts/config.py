"""Model of a run of rollouts, its problems, and the options of its tasks. This module does not
import torch.

The model is a Llama of the workload `gpt` that reads and writes bytes of UTF-8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.copying import copying
from shared.errors import InvalidRunFile
from shared.settings import read_table
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.gpt.config import GptConfig, flops_per_sample
from shared.workloads.rollouts.problem_dataset import stored
from shared.workloads.rollouts.problems import END, Problem, drawn, encoded, solution

VOCABULARY = 256  # bytes
LOOKED_AT = 256  # drawn problems that are checked before a run is made
FILE = "problems"  # name of the file of a run's problems
SEED = 0  # seed of the generators, since a problem is identified by its number
_WORD = (1 << 63) - 1


class ListedProblems(ChunkRef, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems of a run's dataset."""

    without_solution: int


class RolloutsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `[model]` table."""

    problems: str = "arithmetic"  # a generator, where the run has no dataset
    # size of the problems: digits of a sum, numbers of a row
    size: Annotated[int, Meta(ge=1, le=100)] = 2
    context: Annotated[int, Meta(ge=8, le=1 << 16)] = 64  # bytes of a problem and its answer
    answer: Annotated[int, Meta(ge=1, le=1 << 15)] = 24  # most of these bytes for the answer
    n_layer: Annotated[int, Meta(ge=1, le=512)] = 4
    n_head: Annotated[int, Meta(ge=1, le=512)] = 4
    n_embd: Annotated[int, Meta(ge=1, le=1 << 15)] = 128
    dataset: ListedProblems | None = None  # filled in from the run's dataset

    def __post_init__(self) -> None:
        if self.answer >= self.context:
            raise InvalidRunFile(
                f"[model] answer {self.answer} must be below context {self.context}: the problem"
                " needs room too"
            )

    @classmethod
    def for_run(cls, raw: Mapping[str, Any], dataset: DatasetManifest | None) -> RolloutsConfig:
        """Check a table, and that its problems leave room for their answers. Raises
        InvalidRunFile.
        """
        checked = cls.from_dict(raw)
        if dataset is None:
            checked = msgspec.structs.replace(checked, dataset=None)
            checked._check_drawn()
            return checked
        if given := [key for key in ("problems", "size") if key in raw]:
            raise InvalidRunFile(
                f"[model] {given[0]} is for generated problems, but this run uses those of the "
                f'dataset "{dataset.name}": remove the line or the dataset'
            )
        place, used = dataset.meta["prompt_place"], int(dataset.meta["prompt_bytes"])
        checked.check_room(used, f'the problem of {place} in "{dataset.name}"')
        checked._check_answer(int(dataset.meta["answer_bytes"]), f'a problem of "{dataset.name}"')
        without = int(dataset.meta["without_solution"])
        listed = msgspec.structs.asdict(dataset.chunks[0])
        found = ListedProblems(**listed, without_solution=without)
        return msgspec.structs.replace(checked, dataset=found)

    def _check_drawn(self) -> None:
        problems = Problems(self)
        try:
            for number in range(LOOKED_AT):
                known = solution(problems.get(number)) or ""
                self._check_answer(len(encoded(known)), f"problem {number}")
        except InvalidRunFile as error:
            raise InvalidRunFile(f"[model] problems: {error.message}") from error

    def _check_answer(self, size: int, what: str) -> None:
        if size > self.answer:
            raise InvalidRunFile(
                f"the answer to {what} has {size} bytes, and [model] answer {self.answer} leaves no"
                " room for it"
            )

    def check_room(self, used: int, what: str) -> None:
        """Raise InvalidRunFile for a problem that leaves no room for an answer."""
        most = self.context - self.answer
        if used > most:
            raise InvalidRunFile(
                f"{what} has {used} bytes, but [model] context {self.context} leaves {most} for it"
                f" before an answer of {self.answer}: raise context"
            )

    @property
    def network(self) -> GptConfig:
        return copying(GptConfig, self)(
            vocab_size=VOCABULARY,
            block_size=self.context,
            dropout=0.0,
            architecture="llama",
        )

    @property
    def token_flops(self) -> float:
        """Return the FLOPs of reading or writing one token."""
        return flops_per_sample(self.network) / (3 * self.context)

    def fits(self, answer: Sequence[int], room: int) -> bool:
        """Return True if an answer ends correctly: with its end token, or at its length limit."""
        whole = END not in answer[:-1] and max(answer) < VOCABULARY
        most = min(self.answer, room)
        return whole and (len(answer) == most if answer[-1] != END else len(answer) <= most + 1)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RolloutsConfig:
        """Check a table. Raises InvalidRunFile, with the nearest known key for an unknown one."""
        return read_table(raw, cls, "[model]")


class Problems:
    """Problems of a run by their numbers: drawn, or lines of its dataset, which repeat."""

    def __init__(
        self, config: RolloutsConfig, file: Path | None = None, *, heldout: bool = False
    ) -> None:
        self._config, self._heldout = config, heldout
        self._listed = stored(file) if file else ()

    @classmethod
    def of(cls, config: RolloutsConfig, file: Callable[[str], Path]) -> Problems:
        """Return the problems that a run learns from; `file` gives the run's files by name."""
        return cls(config, file(FILE) if config.dataset else None)

    def first(self, most: int) -> list[Problem]:
        """Return the first `most` problems, or all of a dataset that has fewer."""
        return [self.get(number) for number in range(min(most, len(self._listed) or most))]

    def get(self, number: int, size: int = 0) -> Problem:
        """Return problem `number`, drawn with another `size` if that is not 0. Raises
        InvalidRunFile for a problem that leaves no room for an answer.
        """
        config, heldout = self._config, self._heldout
        if self._listed:
            found = self._listed[number % len(self._listed)]
        else:
            size = size or config.size
            found = drawn(config.problems, SEED, number, size, heldout=heldout)
        config.check_room(len(encoded(found.prompt)), f"problem {number}")
        return found


class RolloutsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The workload's own keys of `[task.options]`; counts are problems unless another unit is
    named.
    """

    problems: Annotated[int, Meta(ge=1, le=4096)] = 64  # problems of one actor's task
    group: Annotated[int, Meta(ge=2, le=256)] = 8  # answers to each problem
    temperature: Annotated[float, Meta(gt=0, le=4)] = 1.0
    slots: Annotated[int, Meta(ge=1, le=1024)] = 64  # answers generated together on one device
    chunk: Annotated[int, Meta(ge=1, le=4096)] = 64  # problems that are sealed together
    window: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # newest problems from which learners draw
    window_min: Annotated[int, Meta(ge=1, le=1 << 20)] = 64  # problems before the first learn task
    reuse: Annotated[float, Meta(ge=0.01, le=1000)] = 2.0  # times that an answer is learnt from
    queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # problems that may wait for a learner
    learners: Annotated[int, Meta(ge=1, le=1000)] = 1  # learn tasks that may run at once
    # most versions that answers may be behind when they begin, and again when they are learnt from
    lag: Annotated[int, Meta(ge=0, le=1000)] = 2
    warm_steps: Annotated[int, Meta(ge=0, le=1 << 20)] = (
        0  # steps on solved problems, before rollouts; none with init_from
    )
    # learning rate of these steps; [train] lr applies to the others
    warm_lr: Annotated[float, Meta(gt=0, le=1)] = 5e-3
    # size of these problems; 0 = as the others
    warm_size: Annotated[int, Meta(ge=0, le=100)] = 0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RolloutsOptions:
        """Check a table. Raises InvalidRunFile, with the nearest known key for an unknown one."""
        if raw.get("group") == 1:
            raise InvalidRunFile(
                "[task.options] group = 1: an answer is compared with the others of its group, so"
                " a group has at least 2"
            )
        return read_table(raw, cls, "[task.options]")


def answer_seed(task_seed: int, problem: int, sample: int) -> int:
    """Return the seed of one answer of a task."""
    said = sha256(b"answer\n%d\n%d\n%d" % (task_seed, problem, sample)).digest()
    return int.from_bytes(said[:8], "big") & _WORD
