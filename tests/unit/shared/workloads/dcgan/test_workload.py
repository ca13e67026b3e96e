"""The dcgan workload: which models there can be, what they begin with, and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from shared.errors import BadRequest, InvalidRunFile
from shared.workloads.base import RunDraft, installed, load
from shared.workloads.dcgan.config import DcganConfig, schema
from shared.workloads.dcgan.model import Dcgan, build
from tests.support.tensor_samples import count
from tests.support.workloads.tiny_dcgan import NETWORKS, WORKLOAD, config, digits, job
from tests.support.workloads.tiny_gpt import Folder, same


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return digits(tmp_path_factory.mktemp("blobs"))


def parameters(network: str, **model: int) -> int:
    specs = WORKLOAD.schema(model)
    return count(tuple(spec for spec in specs if spec.name.startswith(network)), "parameter")


def test_it_is_installed() -> None:
    assert "dcgan" in installed()
    assert load("dcgan").name == "dcgan"


def test_the_classic_sizes() -> None:
    assert (parameters("generator"), parameters("discriminator")) == (3_576_704, 2_765_568)


@pytest.mark.parametrize("size", [8, 28, 32, 48, 64])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_size_fits_its_schema_and_draws_that_size(size: int, channels: int) -> None:
    model = DcganConfig(
        image_size=size, channels=channels, generator_width=4, discriminator_width=2
    )
    with torch.device("meta"):
        made = Dcgan(model).state_dict()
    wanted = {spec.name: (spec.shape, spec.dtype) for spec in schema(model)}
    kinds = {torch.float32: "F32", torch.int64: "I64"}
    assert [*wanted.items()] == [
        (name, (tuple(value.shape), kinds[value.dtype])) for name, value in made.items()
    ]
    networks = build(model, WORKLOAD.init(model.to_dict(), 0), "cpu")
    images = networks.draw(torch.randn(3, model.latent))
    assert images.shape == (3, channels, size, size)
    assert images.abs().max() <= 1
    assert networks.judge(images).shape == (3,)


def test_statistics_of_batch_norm_are_buffers_and_counters() -> None:
    roles = {spec.name.rpartition(".")[2]: spec.role for spec in WORKLOAD.schema({})}
    assert roles == {
        "weight": "parameter",
        "bias": "parameter",
        "running_mean": "buffer",
        "running_var": "buffer",
        "num_batches_tracked": "counter",
    }


def test_version_0_is_the_papers_and_depends_on_the_seed_alone() -> None:
    first = WORKLOAD.init({"image_size": 32}, 7)
    torch.manual_seed(3)
    assert same(first, WORKLOAD.init({"image_size": 32}, 7))
    assert not same(first, WORKLOAD.init({"image_size": 32}, 8))
    conv, scale = first["generator.up1.weight"], first["discriminator.norm1.weight"]
    assert float(conv.mean()) == pytest.approx(0, abs=1e-3)
    assert float(conv.std()) == pytest.approx(0.02, rel=0.02)
    assert float(scale.mean()) == pytest.approx(1, abs=0.02)
    assert float(first["generator.norm1.bias"].abs().max()) == 0
    assert float(first["generator.norm1.running_var"].min()) == 1


def test_the_dataset_says_how_large_images_are(data: Folder) -> None:
    model = config(data)
    assert (model["image_size"], model["channels"]) == (8, 1)
    assert WORKLOAD.samples(model, data.manifest) == [c.items for c in data.manifest.chunks]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"channels": 3}, r"channels 3 does not fit .* have 1: leave it out"),
        ({"image_size": 64}, r"image_size 64 does not fit .* have 8"),
        ({"latnet": 10}, 'did you mean "latent"'),
        ({"latent": 0}, "latent: expected a whole number of at least 1"),
        ({"latent": "x"}, "latent"),
    ],
)
def test_a_model_that_cannot_be_gets_a_sentence(
    data: Folder, raw: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidRunFile, match=says):
        WORKLOAD.config(raw, data.manifest)


def test_a_size_between_two_that_can_be_names_both() -> None:
    with pytest.raises(InvalidRunFile, match=r"image_size 30 is not .* 28 or 32 would be"):
        DcganConfig(image_size=30)


def test_it_trains_on_images_and_nothing_else(data: Folder) -> None:
    tokens = msgspec.structs.replace(data.manifest, kind="tokens")
    with pytest.raises(InvalidRunFile, match="holds tokens, but dcgan learns from images"):
        WORKLOAD.config({}, tokens)
    model = config(data)
    for changes in ({"kind": "learn"}, {"update": "experience"}, {"stop": 25}):
        with pytest.raises(BadRequest):
            WORKLOAD.begin(job(model, **changes), WORKLOAD.init(model, 0), data, "cpu")


def test_a_chunk_of_another_size_is_refused(data: Folder, tmp_path: Path) -> None:
    for chunk in data.manifest.chunks:
        (tmp_path / chunk.sha256).write_bytes(b"\0" * (chunk.size - 1))
    model = config(data)
    work = WORKLOAD.begin(
        job(model), WORKLOAD.init(model, 0), Folder(data.manifest, tmp_path), "cpu"
    )
    with pytest.raises(InvalidRunFile, match=r"bytes, but \d+ images of 8 x 8 pixels"):
        work.advance()


def test_both_networks_are_exported(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    found = WORKLOAD.export(model, weights)
    assert same(found, weights)
    assert {name.partition(".")[0] for name in found} == set(NETWORKS)


def test_its_defaults_are_those_of_the_paper() -> None:
    found = WORKLOAD.defaults(RunDraft(plan={"update": "gradient"}))
    assert (found["train"]["lr"], found["train"]["beta1"]) == (2e-4, 0.5)
    assert "optimizer" not in found["train"]
    assert WORKLOAD.defaults(RunDraft())["train"]["optimizer"] == "muon"  # tasks that can be proved
    assert found["task"]["batch_size"] * found["task"]["local_steps"] == 320
