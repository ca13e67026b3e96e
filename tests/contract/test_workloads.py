"""What coordinator and volunteers expect of any workload: the built-in ones, and one that is a
package of its own.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import (
    Data,
    DatasetWanted,
    Job,
    Result,
    RunDraft,
    TaskKind,
    TrainSettings,
    Work,
    Workload,
    load,
)
from shared.workloads.declaration import Measure, Output, Teaching
from shared.workloads.games import Games
from tests.support.workloads import (
    example_workload,
    tiny_causal,
    tiny_dcgan,
    tiny_gomoku,
    tiny_gpt,
    tiny_rollouts,
)

Tensors = dict[str, Tensor]
STEPS, BATCH = 3, 16


@dataclass(frozen=True)
class Subject:
    """A workload, a run of it, and data for its tasks."""

    workload: Workload
    model: Mapping[str, Any]  # as a run file has it
    data: Data
    heldout: Data | None
    kind: TaskKind = "train"
    train: TrainSettings = field(default_factory=TrainSettings)

    @property
    def config(self) -> dict[str, Any]:
        return self.workload.config(self.model, self.data.manifest if self.heldout else None)

    def job(self, **changes: Any) -> Job:
        values: dict[str, Any] = {
            "run": "r",
            "workload": self.workload.name,
            "kind": self.kind,
            "update": "delta",
            "config": self.config,
            "train": self.train,
            "order_seed": 5,
            "start": 0,
            "stop": STEPS * BATCH,
            "seed": 11,
            "steps": STEPS,
            "batch_size": BATCH,
            "global_step": 0,
            "total_steps": 0,
            "options": self.workload.options({}),
        }
        return Job(**(values | changes))

    def begin(self, job: Job | None = None) -> Work:
        base = self.workload.init(self.config, 3)
        return self.workload.begin(job or self.job(), base, self.data, "cpu")

    @cached_property
    def done(self) -> tuple[Result, Tensors]:
        """Report and update of its task, which several tests compare with theirs."""
        return finish(self.begin())


def finish(work: Work) -> tuple[Result, Tensors]:
    while not work.done:
        work.advance()
    return work.result()


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------------------------- subjects


@dataclass(frozen=True)
class PartPosition:
    """Where a subject keeps its files, and images that several share."""

    path: Path
    images: Callable[[], tiny_gpt.Folder]


def gpt(place: PartPosition) -> Subject:
    data = tiny_gpt.sums(place.path)
    return Subject(load("gpt"), tiny_gpt.SMALL, data, data.heldout())


def gpt_llama(place: PartPosition) -> Subject:
    data = tiny_gpt.sums(place.path)
    return Subject(load("gpt"), tiny_gpt.LLAMA, data, data.heldout())


def dcgan(place: PartPosition) -> Subject:
    data = place.images()
    model = {"generator_width": 8, "discriminator_width": 8, "latent": 16}
    return Subject(load("dcgan"), model, data, data.heldout(), train=tiny_dcgan.ADAM)


def gomoku(place: PartPosition) -> Subject:
    window = tiny_gomoku.Window(place.path)
    window.seal(tiny_gomoku.play(tiny_gomoku.lively(), 12, place.path))
    return Subject(load("gomoku"), tiny_gomoku.BOARD, window, None, "learn")


def rollouts(place: PartPosition) -> Subject:
    return Subject(
        load("rollouts"), tiny_rollouts.MODEL, tiny_rollouts.window(place.path), None, "learn"
    )


def cnn(place: PartPosition) -> Subject:
    sys.path.insert(0, str(example_workload.install(place.path)))
    digits = example_workload.write_digits(place.path / "digits", 400)

    def put(blob: bytes) -> str:
        name = hashlib.sha256(blob).hexdigest()
        (place.path / name).write_bytes(blob)
        return name

    workload = load("cnn")
    request = DatasetWanted(name="digits", sources=(digits,), heldout_share=0.1)
    data = tiny_gpt.Folder(workload.dataset(request, put, pytest.fail), place.path)
    return Subject(workload, {"width": 8}, data, data.heldout())


def writer(place: PartPosition) -> Subject:
    sys.path.insert(0, str(example_workload.install(place.path)))
    data = tiny_gpt.sums(place.path)
    return Subject(load("writer"), {"n_layer": 1}, data, data.heldout())


def _causal(model: Mapping[str, Any]) -> Callable[[PartPosition], Subject]:
    def made(place: PartPosition) -> Subject:
        data = tiny_gpt.sums(place.path)
        return Subject(load("causal-lm"), model, data, data.heldout())

    return made


def chat(place: PartPosition) -> Subject:
    data = tiny_causal.dialogues(place.path)
    model = tiny_causal.table(tiny_causal.QWEN2, train="lora", lora=LORA)
    return Subject(load("causal-lm"), model, data, data.heldout())


LORA = {"rank": 4, "dropout": 0.1}
SUBJECTS: dict[str, Callable[[PartPosition], Subject]] = {
    **{
        made.__name__: made for made in (gpt, gpt_llama, dcgan, gomoku, rollouts, cnn, writer, chat)
    },
    "llama-head": _causal(tiny_causal.table(tiny_causal.LLAMA, train="head")),
    **{kind: _causal(tiny_causal.table(shape)) for kind, shape in tiny_causal.SHAPES.items()},
    **{
        f"{kind}-lora": _causal(tiny_causal.table(shape, train="lora", lora=LORA))
        for kind, shape in tiny_causal.SHAPES.items()
    },
}
QUICK = ("llama", "qwen3", "gpt2", "qwen2-lora", "gpt2-lora")  # of the architectures


def _subjects() -> Iterator[ParameterSet]:
    for name in SUBJECTS:
        slow = name.removesuffix("-lora") in tiny_causal.SHAPES and name not in QUICK
        slow |= name == "writer"  # the library's trainer takes long to import
        yield pytest.param(name, marks=pytest.mark.slow if slow else ())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tiny_gpt.Folder:
    return tiny_dcgan.digits(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module", params=_subjects())
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    before = list(sys.path)
    path = tmp_path_factory.mktemp(request.param)
    yield SUBJECTS[request.param](PartPosition(path, lambda: request.getfixturevalue("images")))
    sys.path[:] = before


# -------------------------------------------------------------------------------------- the package


LOADING = """
import json, sys
for line in sys.stdin:
    path, name, config = json.loads(line)
    sys.path[:0] = path
    from shared.workloads.base import load
    workload = load(name)
    count = len(workload.schema(workload.config(config, None)))
    print(json.dumps([workload.name, count, "torch" in sys.modules]), flush=True)
"""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[subprocess.Popen[str]]:
    """A process without torch that loads one workload after another."""
    command = [sys.executable, "-c", LOADING]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


def test_its_entry_point_loads_without_torch(
    subject: Subject, elsewhere: subprocess.Popen[str]
) -> None:
    asked = [sys.path, subject.workload.name, dict(subject.config)]
    assert elsewhere.stdin is not None
    assert elsewhere.stdout is not None
    print(json.dumps(asked), file=elsewhere.stdin, flush=True)
    said = elsewhere.stdout.readline()
    count = len(subject.workload.schema(subject.config))
    assert json.loads(said) == [subject.workload.name, count, False]


def test_it_says_what_it_is(subject: Subject) -> None:
    workload = subject.workload
    assert workload.name.replace("-", "_").isidentifier()
    assert workload.version >= 1
    assert set(workload.dataset_kinds) <= {
        "tokens",
        "chat-tokens",
        "images",
        "problems",
        "samples",
    }
    declaration = workload.declaration
    assert declaration.output in get_args(Output)
    assert declaration.taught_by in get_args(Teaching)
    assert declaration.measure in get_args(Measure)
    assert (declaration.taught_by == "experience") == (workload.experience is not None)
    assert (declaration.output == "moves") == isinstance(workload.experience, Games)
    for plan in ({}, {"preset": "fedavg"}, {"preset": "gradient-average"}):
        tables = {"plan": plan}
        assert set(workload.defaults(RunDraft(tables=tables, plan=plan))) <= {
            "model",
            "plan",
            "task",
            "train",
            "validation",
        }


# ------------------------------------------------------------------------------------ the run file


def test_a_model_table_is_filled_in_once_and_can_be_stored(subject: Subject) -> None:
    config = subject.config
    assert json.loads(json.dumps(config)) == config
    manifest = subject.data.manifest if subject.heldout else None
    assert subject.workload.config(config, manifest) == config


@pytest.mark.parametrize("table", ["config", "options"])
def test_an_unknown_key_is_refused_by_name(subject: Subject, table: str) -> None:
    raw = {**(subject.config if table == "config" else {}), "xyzzy": 1}
    read = {
        "config": lambda: subject.workload.config(raw, None),
        "options": lambda: subject.workload.options(raw),
    }
    with pytest.raises(InvalidRunFile, match="xyzzy"):
        read[table]()


def test_a_wrong_type_is_refused_by_name(subject: Subject) -> None:
    key = next(iter(subject.config))
    with pytest.raises(InvalidRunFile, match=key):
        subject.workload.config({**subject.config, key: "many"}, None)


# ---------------------------------------------------------------------------------------- versions


def test_version_0_follows_the_schema_and_the_seed(subject: Subject) -> None:
    workload, config = subject.workload, subject.config
    schema, first = workload.schema(config), workload.init(config, 0)
    assert [spec.name for spec in schema] == list(first)
    for spec in schema:
        value = first[spec.name]
        assert tuple(value.shape) == spec.shape
        assert value.dtype == (torch.int64 if spec.role == "counter" else torch.float32)
        assert torch.isfinite(value.double()).all()
    assert same(first, workload.init(config, 0))
    assert not same(first, workload.init(config, 1))


def test_it_says_what_tasks_hold_and_cost(subject: Subject) -> None:
    counts = subject.workload.samples(subject.config, subject.data.manifest)
    assert len(counts) == len(subject.data.manifest.chunks)
    assert all(count >= 0 for count in counts)
    assert sum(counts) > 0
    assert subject.workload.flops_per_sample(subject.config) > 1


def test_an_export_keeps_what_is_needed(subject: Subject) -> None:
    weights = subject.workload.init(subject.config, 0)
    found = subject.workload.export(subject.config, weights)
    assert set(found) >= set(weights)


# ------------------------------------------------------------------------------------------- tasks


def test_a_task_does_its_steps_and_hands_in_what_the_schema_says(subject: Subject) -> None:
    base = subject.workload.init(subject.config, 3)
    kept = {name: value.clone() for name, value in base.items()}
    work = subject.workload.begin(subject.job(), base, subject.data, "cpu")
    seen = []
    while not work.done:
        seen.append(work.advance())
    report, tensors = work.result()
    steps, samples = [p.step for p in seen], [p.samples for p in seen]
    assert steps == sorted(steps)
    assert samples == sorted(samples)
    assert (steps[-1], samples[-1]) == (STEPS, STEPS * BATCH)
    assert all(progress.steps == STEPS for progress in seen)
    assert (report.steps, report.samples) == (STEPS, STEPS * BATCH)
    assert [spec.name for spec in subject.workload.schema(subject.config)] == list(tensors)
    assert all(value.device.type == "cpu" for value in tensors.values())
    assert all(tensors[name].shape == value.shape for name, value in base.items())
    assert same(base, kept)  # the base version belongs to the caller
    assert not same(base, tensors)
    with pytest.raises(RuntimeError):
        work.advance()


def test_the_same_task_gives_the_same_update_and_another_seed_another(subject: Subject) -> None:
    report, tensors = subject.done
    again, others = finish(subject.begin())
    assert same(tensors, others)
    assert again == report
    elsewhere = subject.job(order_seed=6, seed=12)
    assert not same(tensors, finish(subject.begin(elsewhere))[1])


def test_a_restart_goes_on_bit_for_bit(subject: Subject) -> None:
    whole = subject.done[1]
    broken = subject.begin()
    while broken.advance().step < 2:
        pass
    again = subject.begin()
    again.restore({name: value.clone() for name, value in broken.snapshot().items()})
    assert same(finish(again)[1], whole)
    with pytest.raises(InvalidRunFile, match="another task"):
        subject.begin().restore({})


@pytest.mark.parametrize("kind", ["selfplay", ""])
def test_a_snapshot_of_another_task_is_refused(
    subject: Subject, kind: TaskKind | Literal[""]
) -> None:
    """Its worker would hand in what no recompute can repeat, and be suspended for it."""
    if kind and subject.kind == "train":
        return  # its tasks are of one kind
    changes = {"kind": kind, "update": "experience", "stop": STEPS, "batch_size": 1} if kind else {}
    one, other = (subject.begin(subject.job(seed=seed, **changes)) for seed in (11, 12))
    while one.advance().step < 1:
        pass
    snapshot = one.snapshot()
    with pytest.raises(InvalidRunFile, match="another task"):
        other.restore({name: value.clone() for name, value in snapshot.items()})
    subject.begin(subject.job(seed=11, **changes)).restore(snapshot)


def test_a_pause_changes_nothing(subject: Subject) -> None:
    work = subject.begin()
    while not work.done:
        work.advance()
        work.suspend()
        work.resume()
    assert same(work.result()[1], subject.done[1])


def halve_on(work: Work) -> None:
    """Save memory for as long as the work goes along."""
    while True:
        work.halve()


def test_less_memory_gives_the_same_result_except_for_rounding(subject: Subject) -> None:
    work = subject.begin()
    work.advance()
    work.halve()
    report, tensors = finish(work)
    assert (report.steps, report.samples) == (STEPS, STEPS * BATCH)
    base, whole = subject.workload.init(subject.config, 3), subject.done[1]
    for name, value in tensors.items():
        moved = (whole[name] - base[name]).double().norm()
        assert (value - whole[name]).double().norm() <= 1e-3 * moved + 1e-6
    with pytest.raises(MemoryError):
        halve_on(work)


def test_a_kind_of_work_that_it_does_not_know_is_refused(subject: Subject) -> None:
    known = ("train",) if subject.kind == "train" else ("selfplay", "learn", "evaluate")
    for kind in {"train", "selfplay", "learn", "evaluate"} - set(known):
        with pytest.raises(BadRequest):
            subject.begin(subject.job(kind=kind))


# ---------------------------------------------------------------------------------- what came of it


def test_versions_are_measured_the_same_each_time(subject: Subject) -> None:
    weights = subject.workload.init(subject.config, 0)

    def measure(stop: bool) -> dict[str, float]:
        return subject.workload.evaluate(
            subject.config, weights, subject.heldout, 60.0, lambda: stop
        )

    found = measure(False)
    assert found["loss"] == found["loss"]  # a number
    assert all(isinstance(value, float) for value in found.values())
    assert measure(False) == found
    assert "loss" in measure(True)  # told to stop, it still ends in order


def test_a_sample_is_something_to_look_at(subject: Subject) -> None:
    weights = subject.workload.init(subject.config, 0)
    data = subject.heldout
    found = subject.workload.sample(subject.config, weights, data, "", 7)
    assert found == subject.workload.sample(subject.config, weights, data, "", 7)
    assert found.title
    if found.kind == "png":
        assert found.data.startswith(b"\x89PNG")
    else:
        assert found.text


def test_training_lowers_what_is_measured(subject: Subject) -> None:
    if subject.workload.declaration.measure != "loss":
        return  # its tasks report something else
    steps = 12
    job = subject.job(steps=steps, stop=steps * BATCH, train=TrainSettings(lr=3e-2))
    base = subject.workload.init(subject.config, 3)
    learnt = finish(subject.begin(job))[1]
    before, after = (
        subject.workload.evaluate(subject.config, weights, subject.heldout, 60.0, lambda: False)
        for weights in (base, learnt)
    )
    assert after["loss"] < before["loss"]


# --------------------------------------------------------------------------------- checks of work
