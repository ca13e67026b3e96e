"""Workloads derived from an author's functions: what is derived, and sentences for wrong code."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import BadRequest, InvalidFrame, InvalidRunFile
from shared.workloads.base import DatasetManifest, DatasetWanted, Job, TrainSettings
from shared.workloads.data.image_files import read_png
from shared.workloads.derived.derived_facts import DataKind, derived_of
from shared.workloads.derived.own_model import OwnModel
from shared.workloads.training.ranks import Ranks
from tests.support.workloads.tiny_dcgan import stripes

Write = Callable[..., OwnModel]
_NUMBERS = itertools.count()

IMPORTS = """
import torch
from torch import nn
from volunteer.workload import ModelCode, skip
"""
MODEL = """
def model(width: int = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
"""
LOSS = """
def loss(net, images):
    return (net(images) - images.flatten(1)).square().mean()
"""
CODE = "code = ModelCode(model, loss)"
PICTURES = DatasetManifest(
    name="p", kind="images", licence="", source="", chunks=(), meta={"size": 8, "channels": 1}
)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write an author's module, and return its workload."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(*parts: str, data: DataKind = "images") -> OwnModel:
        module = f"authors{next(_NUMBERS)}"
        (tmp_path / f"{module}.py").write_text(IMPORTS + "\n".join(parts), encoding="utf-8")
        importlib.invalidate_caches()
        kind = data

        class Own(OwnModel):
            name, code, data = "own", f"{module}:code", kind

        return Own()

    return made


def put_in(folder: Path) -> Callable[[bytes], str]:
    def put(blob: bytes) -> str:
        name = hashlib.sha256(blob).hexdigest()
        (folder / name).write_bytes(blob)
        return name

    return put


def refused(workload: OwnModel, manifest: DatasetManifest | None = PICTURES, **table: Any) -> str:
    with pytest.raises(InvalidRunFile) as caught:
        workload.config(table, manifest)
    return caught.value.message


# ------------------------------------------------------------------------------- what is derived


def test_a_plain_model_is_additive_and_its_cost_is_counted(write: Write) -> None:
    derived = derived_of(write(MODEL, LOSS, CODE).config({"width": 5}, PICTURES))
    assert derived.additive
    assert [(name, shape) for name, shape, _ in derived.tensors] == [
        ("1.weight", (5, 64)),
        ("1.bias", (5,)),
        ("3.weight", (64, 5)),
        ("3.bias", (64,)),
    ]
    matrices = 2 * 64 * 5 * 2  # two for a multiplication
    assert 2 * matrices <= derived.flops <= 3 * matrices  # no gradient of the pictures


def test_a_loss_that_is_no_mean_over_samples_is_seen(write: Write) -> None:
    among = "def loss(net, images):\n    return net(images).var(0).mean()"
    assert not derived_of(write(MODEL, among, CODE).config({}, PICTURES)).additive
    normed = MODEL.replace("nn.ReLU()", "nn.BatchNorm1d(width)")
    assert not derived_of(write(normed, LOSS, CODE).config({}, PICTURES)).additive


def test_the_fields_of_a_dataclass_are_the_keys(write: Write) -> None:
    settings = """
from dataclasses import dataclass
@dataclass
class Settings:
    size: int
    width: int = 4
def model(settings: Settings):
    return nn.Sequential(nn.Flatten(), nn.Linear(settings.size ** 2, 64))
"""
    workload = write(settings, LOSS, CODE)
    assert {**workload.config({}, PICTURES), "derived": 0} == {"size": 8, "width": 4, "derived": 0}
    assert 'did you mean "width"' in refused(workload, widht=3)
    assert "does not fit the dataset, which has 8" in refused(workload, size=9)


def test_version_0_does_not_depend_on_the_random_numbers_of_the_machine(write: Write) -> None:
    workload = write(MODEL, LOSS, CODE)
    config = workload.config({}, PICTURES)
    first = workload.init(config, 1)
    torch.manual_seed(5)
    again, other = workload.init(config, 1), workload.init(config, 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["1.weight"], other["1.weight"])
    bound = 64**-0.5  # of a linear layer
    assert 0.9 * bound < float(first["1.weight"].abs().max()) <= bound


def test_a_tied_tensor_travels_once_and_is_exported_twice(write: Write) -> None:
    tied = """
def model():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64))
    net[2].weight = net[1].weight
    return net
"""
    workload = write(tied, LOSS, CODE)
    config = workload.config({}, PICTURES)
    weights = workload.init(config, 0)
    assert list(weights) == ["1.weight", "1.bias", "2.bias"]
    assert set(workload.export(config, weights)) == {*weights, "2.weight"}


def test_a_training_step_as_in_lightning_is_a_loss(write: Write) -> None:
    module = """
class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def training_step(self, images, index):
        return {"loss": (self.layer(images.flatten(1)) - images.flatten(1)).square().mean()}
def model():
    return Module()
"""
    workload = write(module, "code = ModelCode(model)")
    assert derived_of(workload.config({}, PICTURES)).additive


DRAW = "def draw(net, count): return torch.randn(count, 1, 8, 8) * net[1].weight.std() * 9"


def test_a_sample_is_drawn_by_the_author_or_shows_what_is_held_out(
    write: Write, tmp_path: Path
) -> None:
    data = _Folder(stripes(put_in(tmp_path)), tmp_path)
    workload = write(MODEL, LOSS, CODE)
    config = workload.config({}, data.manifest)
    weights = workload.init(config, 1)
    shown = workload.sample(config, weights, data, "", 1)
    assert shown.title.startswith("32 held-out samples, from loss 0")
    assert read_png(shown.data).shape == (42, 82)
    with pytest.raises(BadRequest, match=r"authors.*draws nothing: give ModelCode a `draw"):
        workload.sample(config, weights, None, "", 1)
    drawing = write(MODEL, LOSS, DRAW, "code = ModelCode(model, loss, draw=draw)")
    pictures = [drawing.sample(config, weights, None, "", seed).data for seed in (1, 1, 2)]
    assert pictures[0] == pictures[1] != pictures[2]
    wrong = write(
        MODEL, LOSS, DRAW.replace("1, 8", "4, 8"), "code = ModelCode(model, loss, draw=draw)"
    )
    with pytest.raises(InvalidRunFile, match=r"draw\(\) returned the shape \(32, 4, 8, 8\)"):
        wrong.sample(config, weights, None, "", 1)


def test_a_version_is_a_model_of_the_authors(write: Write) -> None:
    workload = write(MODEL, LOSS, CODE)
    config = workload.config({}, PICTURES)
    weights = workload.init(config, 1)
    model = workload.model(config, workload.export(config, weights))
    assert not model.training
    assert torch.equal(dict(model.named_parameters())["1.weight"], weights["1.weight"])


def test_a_config_of_another_type_or_size_is_refused_before_it_takes_memory(write: Write) -> None:
    workload = write(MODEL, LOSS, CODE)
    config = workload.config({}, PICTURES)
    with pytest.raises(InvalidRunFile, match="width: expected a whole number"):
        workload.init({**config, "width": "4"}, 0)
    with pytest.raises(InvalidFrame, match="builds another model here"):
        workload.init({**config, "width": 1 << 40}, 0)


# ------------------------------------------------------------------------------------- wrong code


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ((MODEL, LOSS), r"\.py has no ModelCode of the name code: end it with `code = Model"),
        ((MODEL, "code = ModelCode(model)"), "has no loss: give it a function"),
        (("def model(): return 3", LOSS, CODE), r"model\(\) returned int: return a torch.nn.Mod"),
        (("def model(width): ...", LOSS, CODE), r"takes width without a type .* `width: int = 1`"),
        (("import notthere",), r"cannot be imported: .*line 5: ModuleNotFoundError"),
        (
            (MODEL, "def loss(net, images): return net(images).mean(1)", CODE),
            r"loss\(\) returned a tensor of the shape \(4,\): return one number, .*\.mean\(\)",
        ),
        (
            (MODEL, "def loss(net, images): return 0.5", CODE),
            r"loss\(\) returned 0.5: return one number",
        ),
        (
            (MODEL, "\n\ndef loss(net, images):\n    return net(images[:, :, 1:]).mean()", CODE),
            r"authors\d+\.py line 12: RuntimeError: mat1 and mat2",
        ),
        (
            (MODEL, LOSS, "def half(samples): return torch.stack(samples[:2])"),
            "a batch of 4 samples has 2 rows: .* must keep every sample",
        ),
    ],
)
def test_wrong_code_gets_a_sentence_with_file_and_next_step(
    write: Write, parts: tuple[str, ...], sentence: str
) -> None:
    last = "code = ModelCode(model, loss, batch=half)" if "half" in parts[-1] else ""
    message = refused(write(*parts, last))
    assert "authors" in message
    assert re.search(sentence, message), message


def test_a_model_whose_shapes_follow_from_something_else_is_refused_where_it_differs(
    write: Write, tmp_path: Path
) -> None:
    growing = """
sizes = iter(range(4, 100))
def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, next(sizes)))
"""
    workload = write(growing, LOSS, CODE)
    config = workload.config({}, None)
    with pytest.raises(InvalidFrame, match=r"builds another model here .*1.weight \[5, 64\] and"):
        workload.init(config, 0)


SAMPLES = "code = ModelCode(model, loss, samples)"


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (
            "    yield [[1.0], 2]; yield [[1.0, 2.0], 2]",
            "sample 2: a sample has 0 f4 .2.*the first",
        ),
        ("    yield 'text'", "sample 1: field 0 of a sample is <U4"),
        ("    return; yield", r"samples\(\) yielded no sample of the files .*: it takes nothing"),
        (
            "    skip('a.wav: too short'); return; yield",
            "no sample of the files .*: a.wav: too short",
        ),
        ("    yield open('/nowhere/at/all')", "authors.*line.*FileNotFoundError"),
        ("    yield from range(9)", "9 different samples are too few"),
    ],
)
def test_wrong_samples_get_a_sentence(
    write: Write, tmp_path: Path, samples: str, sentence: str
) -> None:
    workload = write(MODEL, LOSS, f"def samples(paths):\n{samples}", SAMPLES, data="samples")
    request = DatasetWanted(name="s", sources=())
    with pytest.raises(InvalidRunFile, match=sentence):
        workload.dataset(request, put_in(tmp_path), lambda _: None)


def test_a_dataset_of_samples_is_the_same_each_time_and_says_what_was_skipped(
    write: Write, tmp_path: Path
) -> None:
    samples = """
def samples(paths, high: int = 100):
    skip("odd.txt line 3: no number")
    for number in range(high):
        yield {"x": torch.full((8, 8), number / high), "y": number % 7}
"""
    workload = write(MODEL, LOSS, samples, SAMPLES, data="samples")
    skipped: list[str] = []
    request = DatasetWanted(name="s", sources=(), options={"high": "90"})
    manifest = workload.dataset(request, put_in(tmp_path), skipped.append)
    assert skipped == ["odd.txt line 3: no number"]
    assert manifest.meta["samples"] == 90 - 4
    assert workload.dataset(request, put_in(tmp_path), skipped.append) == manifest
    assert sum(workload.samples({}, manifest)) == 86

    class Other(OwnModel):
        name, code = "other", "nowhere:code"

    with pytest.raises(InvalidRunFile, match="holds samples of own, which other does not"):
        Other().config({}, manifest)


def job(config: dict[str, Any], steps: int = 2) -> Job:
    return Job(
        run="r",
        workload="own",
        kind="train",
        update="delta",
        config=config,
        train=TrainSettings(optimizer="sgd", lr=0.1, warmup_steps=0),
        order_seed=1,
        start=0,
        stop=16 * steps,
        seed=3,
        steps=steps,
        batch_size=16,
        global_step=0,
        total_steps=0,
    )


def test_dropout_is_the_same_for_any_division_into_micro_batches(
    write: Write, tmp_path: Path
) -> None:
    dropping = MODEL.replace("nn.ReLU()", "nn.Dropout(0.5)")
    noisy = LOSS.replace("net(images)", "net(images + torch.randn_like(images))")
    workload = write(dropping, noisy, CODE)
    data = _Folder(stripes(put_in(tmp_path)), tmp_path)
    config = workload.config({}, data.manifest)
    assert derived_of(config).additive
    results = []
    for micro in (16, 5):
        work: Any = workload.begin(job(config), workload.init(config, 1), data, "cpu")
        work.begin_with(micro, most=True, room=0)
        while not work.done:
            work.advance()
        results.append(work.result()[1])
    for name, value in results[0].items():
        assert torch.allclose(value, results[1][name], atol=1e-6)


def test_a_model_with_buffers_is_computed_by_one_process(write: Write, tmp_path: Path) -> None:
    """Each rank would have buffers of its own, of which one would be published."""
    buffered = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, images):
        return self.inner(images.flatten(1)) * self.scale

def model(width: int = 4):
    return Model()
"""
    for text, spread in ((MODEL, True), (buffered, False)):
        workload = write(text, LOSS, CODE)
        data = _Folder(stripes(put_in(tmp_path)), tmp_path)
        config = workload.config({}, data.manifest)
        assert derived_of(config).additive
        work: Any = workload.begin(job(config, steps=1), workload.init(config, 1), data, "cpu")
        ranks = Ranks(["cpu"])
        work.spread(ranks, begin_nothing)
        assert (ranks._task is not None) == spread


def begin_nothing(device: str) -> Any:
    raise AssertionError("no step is computed here")


class _Folder:
    def __init__(self, manifest: DatasetManifest, folder: Path) -> None:
        self.manifest = manifest
        self._folder = folder

    def chunk(self, index: int) -> Path:
        return self._folder / self.manifest.chunks[index].sha256

    def asset(self, name: str) -> Path:
        return self._folder / name
