"""What is measured of a generator, and what it shows: real images score well, noise does not,
training helps.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shared.errors import InvalidRunFile
from shared.workloads.data.classifier import Spread, frechet, load_judge, spread
from shared.workloads.data.image_files import read_png
from shared.workloads.dcgan.evaluate import class_figures
from tests.support.workloads.tiny_dcgan import ADAM, WORKLOAD, config, digits, job, real_images
from tests.support.workloads.tiny_gpt import Folder, finish


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return digits(tmp_path_factory.mktemp("blobs"), size=16)


def measure(
    data: Folder, model: dict[str, object], weights: dict[str, torch.Tensor]
) -> dict[str, float]:
    return WORKLOAD.evaluate(model, weights, data.heldout(), 60, lambda: False)


@pytest.mark.slow
def test_the_distance_falls_clearly_while_it_learns_real_digits(data: Folder) -> None:
    model = config(data, generator_width=16, discriminator_width=16, latent=32)
    weights = WORKLOAD.init(model, 0)
    before = measure(data, model, weights)
    train = msgspec.structs.replace(ADAM, lr=1e-3)
    for number in range(8):
        task = job(model, steps=25, batch=64, train=train, order_seed=number, seed=number)
        weights = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    after = measure(data, model, weights)
    assert after["loss"] < before["loss"] / 3
    assert after["coverage"] >= 0.8 > before["coverage"]
    assert after["class_overlap"] > before["class_overlap"] + 0.4
    assert before["complete"] == after["complete"] == 1.0
    assert after["frechet_real"] < after["loss"]


@pytest.mark.slow
def test_it_is_the_same_each_time_and_ends_early_when_told(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 3)
    assert measure(data, model, weights) == measure(data, model, weights)
    some = WORKLOAD.evaluate(model, weights, data.heldout(), 60, lambda: True)
    assert (some["complete"], some["images"]) == (0.0, 128.0)


def test_a_model_that_diverged_has_an_infinite_distance_and_still_a_sample(data: Folder) -> None:
    model = config(data)
    weights = {
        name: torch.full_like(value, float("nan")) if value.ndim == 4 else value
        for name, value in WORKLOAD.init(model, 0).items()
    }
    assert measure(data, model, weights)["loss"] == float("inf")
    assert read_png(WORKLOAD.sample(model, weights, None, "", 0).data).max() == 0


def test_without_a_judge_it_says_what_to_do(data: Folder, tmp_path: Path) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    bare = Folder(msgspec.structs.replace(data.manifest, assets={}), tmp_path)
    with pytest.raises(InvalidRunFile, match="has no judge of images"):
        measure(bare, model, weights)
    with pytest.raises(InvalidRunFile, match="needs a dataset"):
        WORKLOAD.evaluate(model, weights, None, 1, lambda: False)
    (tmp_path / data.manifest.assets["judge"].sha256).write_bytes(b"\0" * 100)
    with pytest.raises(InvalidRunFile, match="the judge of this dataset cannot be used"):
        measure(Folder(data.manifest, tmp_path), model, weights)
    with pytest.raises(InvalidRunFile, match="cannot be used"):
        load_judge(data.asset("judge"), 3)


def test_the_distance_of_two_normal_distributions_is_the_one_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 3, 8):
        roots = rng.standard_normal((2, size, size))
        covariances = roots @ roots.transpose(0, 2, 1)
        means = rng.standard_normal((2, size))
        one, other = (Spread(m, c) for m, c in zip(means, covariances, strict=True))
        values = np.linalg.eigvals(covariances[0] @ covariances[1])
        trace = covariances[0].trace() + covariances[1].trace()
        expected = np.square(means[0] - means[1]).sum() + trace
        expected -= 2 * np.sqrt(np.maximum(values.real, 0)).sum()
        assert frechet(one, other) == pytest.approx(float(expected), rel=1e-6)
        assert frechet(one, one) == pytest.approx(0, abs=1e-6)


def test_real_images_are_near_and_one_image_again_and_again_is_far(data: Folder) -> None:
    judge = load_judge(data.asset("judge"), 1)
    model = config(data)
    real, _ = judge.look(real_images(data, model, 0, 800))
    assert frechet(spread(real), judge.real) < 3
    same = Spread(judge.real.mean, np.zeros_like(judge.real.covariance))
    assert frechet(same, judge.real) == pytest.approx(100, rel=1e-2)


def test_classes_count_only_when_they_are_drawn_for_sure() -> None:
    real = np.array([0.5, 0.25, 0.25, 0.0])
    odds = np.eye(4)[[0] * 6 + [1] * 3 + [2]]
    assert class_figures(odds, real) == pytest.approx((1.0, 0.5 + 0.25 + 0.1))
    assert class_figures(odds[:9], real)[0] == pytest.approx(2 / 3)
    assert class_figures(np.full((10, 4), 0.25), real) == (0.0, 0.0)


def test_a_sample_is_64_images_of_fixed_noise(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    one = WORKLOAD.sample(model, weights, None, "", 5)
    assert one.kind == "png"
    assert read_png(one.data).shape == (8 * 18 + 2, 8 * 18 + 2)
    assert one == WORKLOAD.sample(model, weights, None, "", 5)
    assert one.data != WORKLOAD.sample(model, weights, None, "", 6).data
    assert one.data != WORKLOAD.sample(model, weights, None, "others", 5).data
    assert {len(line) for line in one.text.splitlines()} == {36}
