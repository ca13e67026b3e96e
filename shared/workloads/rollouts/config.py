"""Model of a run of rollouts, its problems, and the options of its tasks. This module does not
import torch.

The model is a Llama of the workload `gpt` that reads and writes bytes of UTF-8, or one of the
workload `causal-lm` from a folder or a hub, with its tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.settings import check_keys, read_table
from shared.tensors.spec import Schema
from shared.workloads.base import ChunkRef, DatasetManifest
from shared.workloads.causal_lm import config as causal_lm
from shared.workloads.causal_lm import model_folder
from shared.workloads.causal_lm.config import CausalConfig
from shared.workloads.causal_lm.model_folder import TOKENIZER
from shared.workloads.data.chat_template import TEMPLATE
from shared.workloads.experience import ReplayOptions
from shared.workloads.generation.prompt_text import PromptText
from shared.workloads.gpt import config as gpt
from shared.workloads.gpt.config import GptConfig
from shared.workloads.rollouts.problem_dataset import stored
from shared.workloads.rollouts.problems import (
    BYTES,
    Problem,
    Text,
    drawn,
    encoded,
    longest,
    solution,
)

FILE, TEXT = "problems", "tokenizer"  # names of the files of a run, which its dataset has
SEED = 0  # seed of the generators, since a problem is identified by its number
_WORD = (1 << 63) - 1


class ListedProblems(ChunkRef, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """File with the problems of a run's dataset."""

    without_solution: int  # number of problems without a solution


class RolloutsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `[model]` table."""

    problems: str = "arithmetic"  # a generator, where the run has no dataset
    # size of the problems: digits of a sum, numbers of a row
    size: Annotated[int, Meta(ge=1, le=100)] = 2
    context: Annotated[int, Meta(ge=8, le=1 << 16)] = (
        64  # bytes or tokens of a problem and its answer
    )
    answer: Annotated[int, Meta(ge=1, le=1 << 15)] = 24  # most bytes or tokens of the answer
    n_layer: Annotated[int, Meta(ge=1, le=512)] = 4
    n_head: Annotated[int, Meta(ge=1, le=512)] = 4
    n_embd: Annotated[int, Meta(ge=1, le=1 << 15)] = 128
    dataset: ListedProblems | None = None  # filled in from the run's dataset
    # filled in from the model that `from` names: its table of `causal-lm`; from the run's dataset:
    # the tokenizer, the token that ends an answer, and whether a chat template wrote the prompts
    base: dict[str, Any] | None = None
    tokenizer: ChunkRef | None = None
    end: int = BYTES.end
    chat: bool = False

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
        for key in {"train", "lora", "base_precision", "config"} & raw.keys():
            if "from" not in raw:
                raise InvalidRunFile(
                    f"[model] {key} is for a model of a folder or a hub, which from names"
                )
        checked = cls.from_dict(_taken_up(raw) if "from" in raw else raw)
        if dataset is None:
            if checked.base:
                raise InvalidRunFile(
                    "[model] from needs problems of a dataset: coordinator dataset add NAME"
                    ' --problems FILE --tokenizer MODEL/tokenizer.json, and a line dataset = "NAME"'
                )
            checked = msgspec.structs.replace(checked, dataset=None)
            checked.check_drawn(checked.size, "[model] problems")
            return checked
        if unused := [key for key in ("problems", "size") if key in raw]:
            raise InvalidRunFile(
                f"[model] {unused[0]} is for generated problems, but this run uses those of the "
                f'dataset "{dataset.name}": remove the line or the dataset'
            )
        checked = checked._with_tokenizer(dataset)
        place, used = dataset.meta["prompt_place"], int(dataset.meta["prompt_size"])
        checked.check_room(used, f'the problem of {place} in "{dataset.name}"')
        checked._check_answer(int(dataset.meta["answer_size"]), f'a problem of "{dataset.name}"')
        without = int(dataset.meta["without_solution"])
        listed = msgspec.structs.asdict(dataset.chunks[0])
        listed_problems = ListedProblems(**listed, without_solution=without)
        return msgspec.structs.replace(checked, dataset=listed_problems)

    def _with_tokenizer(self, dataset: DatasetManifest) -> RolloutsConfig:
        """Return the table with the tokenizer of the model that `from` names. Raises
        InvalidRunFile if the dataset's problems were made for another tokenizer.
        """
        used, base = dataset.assets.get(TEXT), self.causal
        if base is None:
            if used is not None:
                raise InvalidRunFile(
                    f'the problems of "{dataset.name}" were made for the tokenizer of a model:'
                    " name the model by [model] from, or add them without --tokenizer"
                )
            return self
        if self.tokenizer is not None:
            return self  # an earlier call has filled it in
        folder = causal_lm.folder_of(base)
        if used is None or used.sha256 != model_folder.tokenizer_sha256(folder):
            raise InvalidRunFile(
                f'the problems of "{dataset.name}" were made without the tokenizer of this model:'
                f" coordinator dataset add NAME --problems FILE --tokenizer {folder / TOKENIZER}"
            )
        chat, end = TEMPLATE in dataset.assets, dataset.meta.get("end")
        dataset_ends, usual = () if end is None else (int(end),), base.base.generation.ends
        ends = (*dataset_ends, *usual) if chat else (*usual, *dataset_ends)
        if not ends or max(ends[0], used.items - 1) >= base.shape.vocab_size:
            raise InvalidRunFile(
                f"[model] from: the tokenizer in {folder} has no token that ends an answer, or more"
                " tokens than the model"
            )
        return msgspec.structs.replace(self, tokenizer=used, end=ends[0], chat=chat)

    def check_drawn(self, size: int, key: str) -> None:
        """Raise InvalidRunFile, with the key, if a drawn problem of this size, or its solution, may
        have no room.
        """
        try:
            problem = longest(self.problems, size)
            solution_size = len(encoded(solution(problem) or ""))
            label = f'the problem "{problem.prompt}"'
            if size == self.size:
                self._check_answer(solution_size, label)
            over = max(0, solution_size - self.answer)  # a warm start learns longer solutions too
            self.check_room(len(encoded(problem.prompt)) + over, label)
        except InvalidRunFile as error:
            raise InvalidRunFile(f"{key}: {error.message}") from error

    def _check_answer(self, size: int, label: str) -> None:
        if size > self.answer:
            raise InvalidRunFile(
                f"the answer to {label} has {size} {self.unit}, and [model] answer {self.answer}"
                " leaves no room for it"
            )

    def check_room(self, used: int, label: str) -> None:
        """Raise InvalidRunFile for a problem that leaves no room for an answer."""
        most = self.context - self.answer
        if used > most:
            raise InvalidRunFile(
                f"{label} has {used} {self.unit}, but [model] context {self.context} leaves {most} for"
                f" it before an answer of {self.answer}: raise context"
            )

    @property
    def unit(self) -> str:
        """Return the unit of `context` and `answer`."""
        return "bytes" if self.base is None else "tokens"

    @property
    def network(self) -> GptConfig:
        return GptConfig(
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            vocab_size=BYTES.vocabulary,
            block_size=self.context,
            dropout=0.0,
            architecture="llama",
        )

    @property
    def token_flops(self) -> float:
        """Return the FLOPs of reading or writing one token."""
        base = self.causal
        whole = causal_lm.flops_per_sample(base) if base else gpt.flops_per_sample(self.network)
        return whole / (3 * self.context)

    @property
    def schema(self) -> Schema:
        """Return every tensor of a version."""
        base = self.causal
        return causal_lm.schema(base) if base else gpt.schema(self.network)

    @property
    def causal(self) -> CausalConfig | None:
        """Return the model named by `from`; None without `from`."""
        return CausalConfig.from_dict(self.base) if self.base else None

    def text(self, file: Callable[[str], Path]) -> Text:
        """Return the run's conversion of texts; `file` gives the run's files by name."""
        base = self.causal
        return _text_of(file(TEXT), base.shape.vocab_size, self.end, self.chat) if base else BYTES

    def fits(self, answer: Sequence[int], room: int, vocabulary: int) -> bool:
        """Return True if an answer ends correctly: with its end token, or at its length limit."""
        whole = self.end not in answer[:-1] and max(answer) < vocabulary
        most = min(self.answer, room)
        return whole and (
            len(answer) == most if answer[-1] != self.end else len(answer) <= most + 1
        )

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RolloutsConfig:
        """Return a checked table as a struct. Raises InvalidRunFile as `read_table` does."""
        return read_table(raw, cls, "[model]")


def _taken_up(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read the model, of a folder or a hub, that a new run's file names, and add its table as
    `base`. Raises InvalidRunFile.
    """
    for key in ("n_layer", "n_head", "n_embd"):
        if key in raw:
            raise InvalidRunFile(f"[model] has both from and {key}: give one of them")
    check_keys(raw, (*RolloutsConfig.__struct_fields__, *causal_lm.TABLE_KEYS), "[model]")
    own_keys = {key: raw[key] for key in RolloutsConfig.__struct_fields__ if key in raw}
    checked = RolloutsConfig.from_dict(own_keys)
    base_keys = {key: value for key, value in raw.items() if key not in own_keys}
    base = causal_lm.config_for({**base_keys, "context": checked.context}, None)
    if base.lora is not None and base.lora.dropout:
        raise InvalidRunFile("[model.lora] dropout must be 0 in a run of rollouts")
    return {**own_keys, "base": base.to_dict()}


@lru_cache(maxsize=4)
def _text_of(path: Path, vocabulary: int, end: int, chat: bool) -> Text:
    prompt_text = PromptText(path.read_bytes(), vocabulary)
    return Text(
        prompt=lambda text: prompt_text.encode(text, marks=chat),
        answer=prompt_text.continuation,
        decode=lambda tokens: prompt_text.decode([token for token in tokens if token != end]),
        end=end,
        vocabulary=vocabulary,
    )


class Problems:
    """Problems of a run by their numbers: drawn, or lines of its dataset, which repeat."""

    def __init__(
        self,
        config: RolloutsConfig,
        file: Path | None = None,
        text: Text = BYTES,
        *,
        heldout: bool = False,
    ) -> None:
        self._config, self._heldout, self.text = config, heldout, text
        self._listed = stored(file) if file else ()

    @classmethod
    def of(cls, config: RolloutsConfig, file: Callable[[str], Path]) -> Problems:
        """Return the problems that a run learns from; `file` gives the run's files by name."""
        return cls(config, file(FILE) if config.dataset else None, config.text(file))

    def first(self, most: int) -> list[Problem]:
        """Return the first `most` problems, or all problems of a dataset that has fewer."""
        return [self.get(number) for number in range(min(most, len(self._listed) or most))]

    def get(self, number: int, size: int = 0) -> Problem:
        """Return problem `number`, drawn with another `size` if that is not 0. Raises
        InvalidRunFile for a problem that leaves no room for an answer.
        """
        config, heldout = self._config, self._heldout
        if self._listed:
            problem = self._listed[number % len(self._listed)]
        else:
            size = size or config.size
            problem = drawn(config.problems, SEED, number, size, heldout=heldout)
        config.check_room(len(self.text.prompt(problem.prompt)), f"problem {number}")
        return problem


class RolloutsOptions(ReplayOptions, frozen=True, kw_only=True):
    """The workload's own keys of `[task.options]`; counts are problems unless another unit is
    named.
    """

    problems: Annotated[int, Meta(ge=1, le=4096)] = 64  # problems of one actor's task
    group: Annotated[int, Meta(ge=2, le=256)] = 8  # answers to each problem
    temperature: Annotated[float, Meta(ge=1e-3, le=4)] = 1.0
    slots: Annotated[int, Meta(ge=1, le=1024)] = 64  # answers generated together on one device
    window: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    reuse: Annotated[float, Meta(ge=0.01, le=1000)] = 2.0
    queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    # learners draw answers that were sealed within this many versions
    lag: Annotated[int, Meta(ge=0, le=1000)] = 2
    warm_steps: Annotated[int, Meta(ge=0, le=1 << 20)] = (
        0  # steps on solved problems, before rollouts; none with init_from
    )
    # learning rate of the warm steps; [train] lr applies to the other steps
    warm_lr: Annotated[float, Meta(gt=0, le=1)] = 5e-3
    # size of the problems of the warm steps; 0 = the size of the other problems
    warm_size: Annotated[int, Meta(ge=0, le=100)] = 0

    @classmethod
    @override
    def from_dict(cls, raw: Mapping[str, Any]) -> RolloutsOptions:
        """Return a checked table as a struct. Raises InvalidRunFile as `read_table` does."""
        if raw.get("group") == 1:
            raise InvalidRunFile(
                "[task.options] group = 1: an answer is compared with the others of its group, so"
                " a group has at least 2"
            )
        return super().from_dict(raw)


def answer_seed(task_seed: int, problem: int, sample: int) -> int:
    """Return the seed of one answer of a task."""
    digest = sha256(b"answer\n%d\n%d\n%d" % (task_seed, problem, sample)).digest()
    return int.from_bytes(digest[:8], "big") & _WORD
