"""Interface of a workload: its model, data, local work, evaluation and sample output.

A workload is an installed package, found through the entry point group `volunteer.workloads` and
enabled by the owner of the machine. The coordinator and the volunteer use a workload only through
this file, `experience` and `games`; adding one needs no change elsewhere.

Tensors pass this interface as a flat map `name -> torch.Tensor` on the CPU, float32 parameters, in
the order of the schema. This module loads without torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import (
    Distribution,
    EntryPoints,
    PackageNotFoundError,
    distribution,
    entry_points,
)
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from shared.errors import BadRequest, InvalidFrame, InvalidRunFile, NotFound
from shared.nearest_name import hint
from shared.sentences import Sentence
from shared.settings import check_keys
from shared.tensors.spec import Schema
from shared.workloads.declaration import Declaration

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from shared.workloads.experience import Experience

ENTRY_POINTS = "volunteer.workloads"

TaskKind = Literal["train", "selfplay", "learn", "evaluate"]
UpdateKind = Literal["delta", "gradient", "experience", "evaluation"]
Role: TypeAlias = Literal["play", "learn", "train"]
# Kinds of tasks of each role; the kind "evaluate" is a match between versions.
KINDS: dict[str, tuple[str, ...]] = {
    "play": ("selfplay", "evaluate"),
    "learn": ("learn",),
    "train": ("train",),
}
Config: TypeAlias = Mapping[str, Any]  # a `[model]` table with all defaults filled in
RunTable: TypeAlias = Mapping[str, Any]  # table of a run file
Weights: TypeAlias = "Mapping[str, torch.Tensor]"  # tensors by name

StepsOrOff = Annotated[int, Meta(ge=0, le=1 << 53)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[train]` of a run file: the inner optimiser, the same on every worker."""

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    lr: Annotated[float, Meta(gt=0, le=1e6)] = 3e-4
    # last rate of the cosine schedule, as a share of lr
    min_lr_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.1
    warmup_steps: StepsOrOff | None = None  # global steps; None = a tenth of all, 20 to 500
    # global steps of the cosine; 0 = all steps of the run ([stop])
    decay_steps: StepsOrOff = 0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    weight_decay: NotNegative = 0.1
    clip_norm: NotNegative = 1.0  # 0 = off
    precision: Literal["float32", "bfloat16"] = "float32"  # autocast type on devices that have it
    prox_mu: NotNegative = 0.0  # FedProx pull towards the base, Li et al. 2020
    # a directory written by `coordinator run export`
    init_from: Annotated[str, Meta(max_length=4096)] = ""


class ChunkRef(msgspec.Struct, frozen=True, kw_only=True):
    """Chunk of a dataset: a blob and its number of items (tokens, images)."""

    sha256: str
    size: int  # bytes
    items: int


class DatasetManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a dataset; `heldout` is emptied before it leaves the coordinator."""

    name: str
    kind: str  # such as "tokens", "images": decides which workloads can read it
    licence: str
    source: str
    chunks: tuple[ChunkRef, ...]
    heldout: tuple[ChunkRef, ...] = ()
    assets: dict[str, ChunkRef] = {}  # e.g. "tokenizer"
    meta: dict[str, str | int | float] = {}  # e.g. vocab_size, dtype, channels


class Data(Protocol):
    """Files of a dataset on this machine."""

    manifest: DatasetManifest

    def chunk(self, index: int) -> Path:
        """Return the file of chunk `index` (of the held-out part in an evaluation). Raises
        NotFound.
        """

    def asset(self, name: str) -> Path:
        """Return the file of an asset such as "tokenizer". Raises NotFound."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Complete description of a task for a worker, without tensors. The worker stores it to resume
    the task after a restart.
    """

    run: str
    workload: str
    kind: TaskKind
    update: UpdateKind
    config: dict[str, Any]  # the `[model]` table, validated by `Workload.config`
    train: TrainSettings
    order_seed: int  # seed of the pass's permutation (see PassOrder)
    start: int  # [start, stop) positions of the pass
    stop: int
    seed: int
    steps: int  # optimiser steps, which the server pays for
    batch_size: int
    global_step: int  # global step of the base version, which sets the learning rate
    total_steps: int  # global steps of the whole run, for the cosine; 0 = unknown
    prompt: str = ""
    options: dict[str, Any] = {}  # the workload's own `[task.options]`, e.g. games, simulations
    base_version: int = 0  # set when work begins
    base_sha256: str = ""  # SHA-256 of that version's published weights, set when work begins


def seed_from(seed: int, first: int) -> int:
    """Return the seed for the part of a job that begins with step `first`; the job's own for 0."""
    return (seed + first * 0x9E3779B97F4A7C15) & ((1 << 63) - 1) if first else seed


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the local work after a call of `Work.advance`."""

    step: int  # finished optimiser steps, or units of `counted`
    steps: int
    samples: int  # finished samples, in total
    # Mean loss over the finished optimiser step, in nats; None within a step, or before it is read.
    loss: float | None = None
    metrics: dict[str, float] = {}  # e.g. loss_g, loss_d
    preview: str = ""  # text for people to look at, such as a sample or a board
    counted: str = ""  # unit of step and samples in a task that does not train, e.g. "games"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Report of local work; `Work.result` returns the tensors with it."""

    steps: int
    samples: int
    loss_first: float | None = None  # None for work without a loss, such as games
    loss_last: float | None = None  # mean of the last tenth of the steps
    metrics: dict[str, float] = {}
    # file of episodes or of a match, read only by the workload's own checks
    experience: bytes = b""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a version that a person can judge."""

    kind: Literal["text", "png"]
    title: str
    text: str = ""
    data: bytes = b""


class Work(Protocol):
    """Task in progress on one device, advanced by the trainer thread."""

    def advance(self) -> Progress:
        """Do a part of the task, such as a micro-batch or some moves, in about half a second at
        most; return the progress. Work whose micro-batches take longer implements `Listening`.

        Raises torch's errors of exhausted memory, and InvalidRunFile.
        """

    @property
    def done(self) -> bool: ...

    def result(self) -> tuple[Result, dict[str, torch.Tensor]]:
        """Return the report, and the weights or mean gradient (CPU, schema order), once `done`."""

    def suspend(self) -> None:
        """Pause: move everything to host memory and free the device's allocator cache."""

    def resume(self) -> None:
        """Undo `suspend`."""

    def halve(self) -> int:
        """Use less memory from now on, after an out-of-memory error; return the new micro-batch.

        The result stays the same except for rounding: the micro-batch is halved and gradients are
        accumulated, activations are computed again instead of kept, or the state is kept in the
        host's memory. The running step starts over. Raises MemoryError if no more can be saved.
        """

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return the state that survives a restart: weights, optimiser, counters. Call it only
        between steps.
        """

    def restore(self, snapshot: Weights) -> None: ...


class Reader(Protocol):
    """Version that reads texts and predicts their continuation."""

    context: int  # most tokens of prompt and answer together
    end: int | None  # token that ends a text
    vocabulary: int  # tokens that the model knows

    def encode(self, text: str, *, marks: bool = False) -> list[int]:
        """Return the tokens of a prompt, at least one. With `marks` the text comes from a chat
        template, and special tokens in it count as such. Raises InvalidRunFile.
        """

    def continuation(self, text: str) -> list[int]:
        """Return the tokens of a text that follows a prompt. Raises InvalidRunFile."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def spelling(self, token: int) -> bytes:
        """Return the bytes of text that a token stands for; b"" for a special token."""

    def scores(self, tokens: Sequence[int], places: Sequence[int]) -> NDArray[np.float32]:
        """Return logits (len(places), V) after the tokens at these places, by one forward pass."""


class Decoder(Reader, Protocol):
    """Version that continues many texts at once, each in a slot of its own.

    The tokens at places 0, 1, ... of a slot are read in order. Returned logits are for the token
    after the last token read: float32 (V,), V tokens in the vocabulary. Slots are never cleared: a
    new text starts at place 0.
    """

    slots: int

    def share(self, source: int, slot: int, count: int) -> None:
        """Copy the first `count` tokens of another slot into a slot."""

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> NDArray[np.float32]:
        """Read a part of a prompt into a slot, from place `start` on; return logits (V,)."""

    def prefill_many(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> NDArray[np.float32]:
        """Read whole prompts at once, each into its own slot (slots ascending) from place 0 on;
        return logits (len(slots), V). It takes as long as if every prompt were as long as the
        longest.
        """

    def decode_step(
        self, slots: Sequence[int], tokens: Sequence[int], places: Sequence[int]
    ) -> NDArray[np.float32]:
        """Read one token of each slot (slots ascending); return logits (len(slots), V)."""


def fit_weights(schema: Schema, weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors of `weights` that a schema lists, in its order. Raises InvalidFrame if one
    is missing or has another shape.
    """
    tensors: dict[str, torch.Tensor] = {}
    for spec in schema:
        value = weights.get(spec.name)
        if value is None or tuple(value.shape) != spec.shape:
            has = "is missing" if value is None else f"has the shape {tuple(value.shape)}"
            raise InvalidFrame(f"{spec.name} {has}, but this model needs {spec.shape}")
        tensors[spec.name] = value.detach()
    return tensors


class DatasetTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a dataset, its share held out of training, and the seed of the split."""

    licence: str = "unknown"
    source: str = ""
    heldout_share: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.heldout_share < 0.5:
            raise InvalidRunFile(f"heldout_share {self.heldout_share} must lie between 0 and 0.5")


class DatasetWanted(DatasetTerms, frozen=True, kw_only=True):
    """Request of an organiser to build a dataset from files."""

    name: str
    sources: tuple[Path, ...]  # files and folders on the machine that builds
    tokenizer: bytes | None = None  # a tokenizer.json
    template: str = ""  # chat template of the tokenizer: a ChatTemplate as JSON; "" = none
    options: Mapping[str, str] = {}  # options of the workload


class ConvertedModel(NamedTuple):
    """Version converted to the format of another library."""

    tensors: Weights  # tensors of a model.safetensors; {}: there is no such file
    files: Mapping[str, bytes]
    code: Sequence[str]  # example code that loads and uses the model, for the card
    needs: str = ""  # packages that the code needs, as pip names them; "": this program
    dtype: str = ""  # type of the written tensors; "": the types of `tensors`


class TextFacts(NamedTuple):
    """Context and tokenizer of a run's model."""

    context: int  # most tokens of prompt and answer together
    tokenizer: bytes | None = None  # tokenizer.json of a model whose run has no file of it


class FormatWanted(NamedTuple):
    """Requested format, and the parts of a dataset to export with the weights."""

    format: str
    tokenizer: bytes | None = None
    template: bytes | None = None  # template of dialogues, as a dataset keeps it
    dtype: str = ""  # type of the weights; "": the format's default


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Model that a run starts from."""

    name: str
    licence: str  # licence of the model; "" = unknown
    size: int  # bytes of the model's weights
    paths: Mapping[str, str] = {}  # SHA-256 of a file -> its path on a model hub


class RunDraft(msgspec.Struct, frozen=True, kw_only=True):
    """Run file before its defaults are filled in."""

    tables: Mapping[str, RunTable] = {}  # as written
    plan: RunTable = {}  # `[plan]` with the keys of its preset
    parameters: int = 0  # of its model


class Workload(Protocol):
    """Kind of training. No method uses the network, except to fetch a model from a hub.

    A workload subclasses this class, so that later additions have defaults.
    """

    name: str
    version: int  # raised by changes after which earlier programs cannot do its tasks
    dataset_kinds: tuple[str, ...]
    declaration: Declaration
    experience: Experience | None = None  # interface to its episodes, if it learns from them
    formats: tuple[str, ...] = ()  # formats that `convert` knows
    optional: tuple[str, ...] = ()  # libraries that only some configs need, by their import names

    @property
    def needs_dataset(self) -> bool:
        """Return False if the workload takes no dataset, or makes its own data."""
        return bool(self.dataset_kinds) and self.declaration.taught_by == "samples"

    def defaults(self, draft: RunDraft) -> Mapping[str, RunTable]:
        """Return this workload's defaults for the tables of a run file, by table."""
        return {}

    def config(self, raw: Mapping[str, Any], manifest: DatasetManifest | None) -> dict[str, Any]:
        """Validate a `[model]` table and fill in every default (vocabulary size from the manifest).
        Raises InvalidRunFile; for an unknown key the message names the nearest known key.
        """

    def options(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the workload's own keys of `[task.options]`. Raises InvalidRunFile."""
        check_keys(raw, (), "[task.options]")
        return {}

    def dataset(
        self, request: DatasetWanted, put: Callable[[bytes], str], skip: Callable[[str], None]
    ) -> DatasetManifest:
        """Build a dataset of this workload. `put` stores each blob (chunk, asset, held-out part)
        and returns its SHA-256; `skip` gets a sentence with file and place for each skipped record.
        Raises InvalidRunFile, or BadRequest if the workload builds no dataset.
        """
        raise BadRequest(
            f"the workload {self.name} does not build datasets itself:"
            " use --text, --chat or --images"
        )

    def schema(self, config: Config) -> Schema:
        """Return names, shapes, dtypes and roles of a version's tensors, in canonical order."""

    def init(self, config: Config, seed: int) -> dict[str, torch.Tensor]:
        """Return version 0, deterministic in the seed."""

    def samples(self, config: Config, manifest: DatasetManifest) -> Sequence[int]:
        """Return the number of samples of each training chunk under this config."""
        return [chunk.items for chunk in manifest.chunks]

    def items_per_sample(self, config: Config) -> int:
        """Return the number of `declaration.items` in a sample: the unit of `[stop] tokens` and of
        progress.
        """
        return 1

    def flops_per_sample(self, config: Config) -> float:
        """Return the FLOPs of forward and backward, for price and task size."""

    def fixed_bytes(self, config: Config) -> int:
        """Return the bytes that training needs for frozen weights and the activations of a sample,
        besides those for each trained parameter.
        """
        return 0

    def streamed_bytes(self, config: Config) -> int:
        """Return the bytes of a device that one sample takes while the weights stay in the memory
        of the host (`Streamable` work); 0 if the workload has no such work.
        """
        return 0

    def libraries(self, config: Config) -> Sequence[str]:
        """Return the libraries of `optional` that training needs under this config."""
        return ()

    def files(self, config: Config) -> Mapping[str, ChunkRef]:
        """Return the files that every version of a run needs besides its tensors, such as frozen
        weights, by asset name. A worker finds each as an asset of its data.
        """
        return {}

    def origin(self, config: Config) -> Origin | None:
        """Return the model that the config names as a run's start, with the paths of its `files` on
        a model hub; None if it names no model.
        """
        return None

    def sources(self, config: Config) -> Mapping[str, Path]:
        """Return the paths of the `files` on the organiser's machine, for a new run."""
        return {}

    def whole(self, config: Config, weights: Weights, files: Mapping[str, Path]) -> Weights:
        """Return a version's tensors and those in its `files`, for `decoder`, `export`,
        `convert`.
        """
        return weights

    def begin(self, job: Job, weights: Weights, data: Data, device: str) -> Work:
        """Start a task on `device` ("cpu", "cuda:0", "mps"). The result is a function of job,
        weights and data alone.
        """

    def check_trains(self, job: Job) -> None:
        """Raise BadRequest for a task that is no training with a delta or a gradient."""
        if job.kind != "train" or job.update not in ("delta", "gradient"):
            raise BadRequest(
                f"{self.name} has no task of the kind {job.kind} with the update {job.update}"
            )

    def evaluate(
        self,
        config: Config,
        weights: Weights,
        heldout: Data | None,
        budget_s: float,
        stop: Callable[[], bool],
    ) -> dict[str, float]:
        """Return a version's metrics, among them "loss" (see `Measure`). All versions get the same
        held-out samples; `budget_s` seconds or `stop` end the evaluation early.
        """

    def sample(
        self, config: Config, weights: Weights, data: Data | None, prompt: str, seed: int
    ) -> Sample:
        """Return a sample for people, deterministic in the seed."""

    def text_facts(self, config: Config) -> TextFacts:
        """Return the model's context and tokenizer; unused if the workload has no text."""
        return TextFacts(self.items_per_sample(config))

    def decoder(
        self, config: Config, weights: Weights, tokenizer: bytes | None, slots: int, device: str
    ) -> Decoder | None:
        """Return a version that answers prompts; None if the workload has no text."""
        return None

    def export(self, config: Config, weights: Weights) -> dict[str, torch.Tensor]:
        """Return the tensors of a published file, e.g. with a tied head written out."""
        return dict(weights)

    def convert(self, target: FormatWanted, config: Config, weights: Weights) -> ConvertedModel:
        """Return a version in one of the `formats`. Raises Configuration if a library is absent."""
        raise NotImplementedError(f"{self.name} has no format {target.format}")


def _entry_points() -> EntryPoints:
    """Return the entry points of the installed workloads."""
    return _read_entry_points(tuple(sys.path))


@lru_cache(maxsize=8)
def _read_entry_points(path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points of the workloads installed on `sys.path`, which is `path`."""
    return entry_points(group=ENTRY_POINTS)


@lru_cache(maxsize=8)
def _missing_extras(path: tuple[str, ...]) -> dict[str, str]:
    """Return the missing extra by workload, for installed workloads that need one."""
    return {
        requirement.name: extra
        for requirement in _read_entry_points(path)
        for extra in requirement.extras
        if not _has_extra(requirement.dist, extra)
    }


def _has_extra(package: Distribution | None, extra: str) -> bool:
    marker = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    needed = [line for line in (package and package.requires) or [] if marker.search(line)]
    try:
        for line in needed:
            distribution(re.split(r"[^\w.-]", line, maxsplit=1)[0])
    except PackageNotFoundError:
        return False
    return True


def installed() -> dict[str, str]:
    """Return "module:attribute" of each installed workload whose extras are installed too, without
    importing it.
    """
    missing = _missing_extras(tuple(sys.path))
    return {
        entry_point.name: f"{entry_point.module}:{entry_point.attr}"
        for entry_point in _entry_points()
        if entry_point.name not in missing
    }


def libraries_here(workload: Workload) -> tuple[str, ...]:
    """Return the optional libraries of a workload that are installed on this machine."""
    return tuple(name for name in workload.optional if is_here(name))


def is_here(library: str) -> bool:
    """Return True if a library is installed on this machine, without importing it."""
    return find_spec(library) is not None


def missing_extra(name: str) -> str:
    """Return the missing extra of a workload; "" = no extra is missing."""
    return _missing_extras(tuple(sys.path)).get(name, "")


def absence(name: str) -> Sentence | None:
    """Return why a workload cannot be loaded here, without importing it; None if it can be. The
    sentence has no install command, since the owner chooses which code to install.
    """
    if extra := missing_extra(name):
        return Sentence(
            'the workload "{name}" needs the extra "{extra}", which is not installed here',
            name=name,
            extra=extra,
        )
    names = _entry_points().names
    if name in names:
        return None
    return Sentence(
        'the workload "{name}" is not installed here: {hint}',
        name=name,
        hint=hint(name, sorted(names)),
    )


def load(name: str, enabled: Sequence[str] | None = None) -> Workload:
    """Return a workload. Raises NotFound if it is not installed, or not in `enabled`."""
    if enabled is not None and name not in enabled:
        sentence = Sentence(
            'the workload "{name}" is not enabled on this machine (setting `workloads`)', name=name
        )
        raise NotFound(sentence)
    if (why := absence(name)) is not None:
        raise NotFound(why)
    (entry_point, *_) = _entry_points().select(name=name)
    workload: Workload = entry_point.load()()
    return workload
