"""Model of a run of rollouts, its problems, and the options of its tasks. No torch here.

The model is a Llama of the workload `gpt` that reads and writes bytes of UTF-8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.errors import InvalidRunFile
from shared.settings import read_table
from shared.workloads.gpt.config import GptConfig, flops_per_sample
from shared.workloads.rollouts.problems import Problem, drawn

VOCABULARY = 256  # bytes
END = 0  # ends an answer; no text holds it
LOOKED_AT = 256  # problems that are checked before a run is made
SEED = 0  # seed of the generators, since a problem is identified by its number
_WORD = (1 << 63) - 1


class RolloutsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `[model]` table."""

    problems: str = "arithmetic"  # a generator
    # size of the problems: digits of a sum, numbers of a row
    size: Annotated[int, Meta(ge=1, le=100)] = 2
    context: Annotated[int, Meta(ge=8, le=1 << 16)] = 64  # bytes of a problem and its answer
    answer: Annotated[int, Meta(ge=1, le=1 << 15)] = 24  # bytes of these for the answer, at most
    n_layer: Annotated[int, Meta(ge=1, le=512)] = 4
    n_head: Annotated[int, Meta(ge=1, le=512)] = 4
    n_embd: Annotated[int, Meta(ge=1, le=1 << 15)] = 128

    def __post_init__(self) -> None:
        if self.answer >= self.context:
            raise InvalidRunFile(
                f"[model] answer {self.answer} must be below context {self.context}: the problem"
                " needs room too"
            )

    def check_problems(self) -> None:
        """Raise InvalidRunFile if problems of this kind cannot be, or leave no room for answers."""
        try:
            for number in range(LOOKED_AT):
                known = solution(self.problem(number))
                if known is not None and (size := len(encoded(known))) > self.answer:
                    raise InvalidRunFile(
                        f"the answer to problem {number} has {size} bytes, and [model] answer"
                        f" {self.answer} leaves no room for it"
                    )
        except InvalidRunFile as error:
            raise InvalidRunFile(f"[model] problems: {error.message}") from error

    @property
    def network(self) -> GptConfig:
        return GptConfig(
            vocab_size=VOCABULARY,
            block_size=self.context,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            dropout=0.0,
            architecture="llama",
        )

    @property
    def token_flops(self) -> float:
        """Return the FLOPs of reading or writing one token."""
        return flops_per_sample(self.network) / (3 * self.context)

    def problem(self, number: int, *, heldout: bool = False, size: int = 0) -> Problem:
        """Return a problem by its number among all of a run, or of another size. Raises
        InvalidRunFile for one that leaves no room for an answer.
        """
        found = drawn(self.problems, SEED, number, size or self.size, heldout=heldout)
        used, most = len(encoded(found.prompt)), self.context - self.answer
        if used > most:
            raise InvalidRunFile(
                f"problem {number} has {used} bytes, but [model] context {self.context} leaves"
                f" {most} beside an answer of {self.answer}: raise context"
            )
        return found

    def fits(self, answer: Sequence[int], room: int) -> bool:
        """Return True if an answer ends as it must: with its end token, or where it is cut off."""
        whole = END not in answer[:-1] and max(answer) < VOCABULARY
        most = min(self.answer, room)
        return whole and (len(answer) == most if answer[-1] != END else len(answer) <= most + 1)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RolloutsConfig:
        """Check a table. Raises InvalidRunFile with the nearest known key for an unknown one."""
        return read_table(raw, cls, "[model]")


class RolloutsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The workload's own keys of `[task.options]`; counts are problems where nothing is said."""

    problems: Annotated[int, Meta(ge=1, le=4096)] = 64  # problems of one actor's task
    group: Annotated[int, Meta(ge=2, le=256)] = 8  # answers to each problem
    temperature: Annotated[float, Meta(gt=0, le=4)] = 1.0
    slots: Annotated[int, Meta(ge=1, le=1024)] = 64  # answers written together on one device
    chunk: Annotated[int, Meta(ge=1, le=4096)] = 64  # problems that are sealed together
    window: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # newest problems from which learners draw
    window_min: Annotated[int, Meta(ge=1, le=1 << 20)] = 64  # problems before the first learn task
    reuse: Annotated[float, Meta(ge=0.01, le=1000)] = 2.0  # times that an answer is learnt from
    queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 256  # problems that may wait for a learner
    learners: Annotated[int, Meta(ge=1, le=1000)] = 1  # learn tasks that may run at once
    # versions that answers may be behind when they are begun, and again when they are learnt from
    lag: Annotated[int, Meta(ge=0, le=1000)] = 2
    warm_steps: Annotated[int, Meta(ge=0, le=1 << 20)] = (
        0  # on solved problems, before rollouts; none with init_from
    )
    # rate of these steps; [train] lr is that of the others
    warm_lr: Annotated[float, Meta(gt=0, le=1)] = 5e-3
    # size of these problems; 0 = that of the others
    warm_size: Annotated[int, Meta(ge=0, le=100)] = 0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RolloutsOptions:
        """Check a table. Raises InvalidRunFile with the nearest known key for an unknown one."""
        if raw.get("group") == 1:
            raise InvalidRunFile(
                "[task.options] group = 1: an answer is compared with the others of its group, so"
                " a group has at least 2"
            )
        return read_table(raw, cls, "[task.options]")


def encoded(text: str) -> list[int]:
    """Return the tokens of a text: its bytes."""
    return list(text.encode().replace(bytes([END]), b""))


def solution(problem: Problem) -> str | None:
    """Return a right answer; None where only a search finds one."""
    if problem.verifier == "sorted":
        items = [str(each) for each in sorted(problem.arguments["items"])]
        return (" " if any(len(each) > 1 for each in items) else "").join(items)
    answer = problem.arguments.get("answer")
    return None if answer is None else str(answer)


def decoded(tokens: Any) -> str:
    """Return the text of tokens, up to the end of an answer."""
    return bytes(int(token) for token in tokens).split(bytes([END]))[0].decode(errors="replace")


def answer_seed(task_seed: int, problem: int, sample: int) -> int:
    """Return the seed of one answer of a task."""
    said = sha256(b"answer\n%d\n%d\n%d" % (task_seed, problem, sample)).digest()
    return int.from_bytes(said[:8], "big") & _WORD
