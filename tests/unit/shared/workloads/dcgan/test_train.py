"""A DCGAN task: what a volunteer's device computes, however often it is interrupted."""

from __future__ import annotations

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from shared.errors import InvalidRunFile
from shared.workloads.dcgan.config import DcganConfig
from shared.workloads.dcgan.model import Dcgan, build
from shared.workloads.dcgan.train import DcganWork, portion
from shared.workloads.training.seeded_random import normal
from tests.support.workloads.tiny_dcgan import (
    ADAM,
    NETWORKS,
    WORKLOAD,
    config,
    cosine,
    digits,
    job,
    real_images,
)
from tests.support.workloads.tiny_gpt import Folder, Weights, close, finish, same


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return digits(tmp_path_factory.mktemp("blobs"), size=16)


def noise(step: int, size: int) -> Tensor:
    return torch.from_numpy(normal(f"noise/{step}", 11, (size, 16)))


def odds(logits: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(logits), torch.full_like(logits, float(real)))


def true_gradients(model: Dcgan, real: Tensor, drawn: Tensor) -> dict[str, Tensor]:
    """Of both losses of one batch, each by itself: the plainest way there is."""
    names = {network: dict(getattr(model, network).named_parameters()) for network in NETWORKS}
    fakes = model.draw(drawn)
    loss_d = odds(model.judge(real), True) + odds(model.judge(fakes.detach()), False)
    loss_g = odds(model.judge(fakes), True)
    found: dict[str, Tensor] = {}
    for network, loss in (("discriminator", loss_d), ("generator", loss_g)):
        values = torch.autograd.grad(loss, list(names[network].values()), retain_graph=True)
        found |= {f"{network}.{n}": v for n, v in zip(names[network], values, strict=True)}
    return found


@pytest.mark.slow
def test_each_gradient_is_of_its_own_loss(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    learnt = finish(WORKLOAD.begin(job(model, steps=20), weights, data, "cpu"))
    for base in (weights, learnt):
        task = job(model, steps=3, batch=16, stop=40, update="gradient")  # the last one is smaller
        found = finish(WORKLOAD.begin(task, base, data, "cpu"))
        plain = build(DcganConfig.from_dict(model), base, "cpu").train()
        expected: dict[str, Tensor] = {}
        for step, size in enumerate((16, 16, 8)):
            real = real_images(data, model, 16 * step, 16 * step + size)
            for name, value in true_gradients(plain, real, noise(step, size)).items():
                expected[name] = expected.get(name, 0) + value * size / 40
        for network in NETWORKS:
            assert cosine(found, expected, network) > 0.9999
        assert close({name: found[name] for name in expected}, expected, 1e-6)


def test_the_statistics_of_batch_norm_are_what_the_batches_had(data: Folder) -> None:
    """F16: they travel, so that the coordinator's copy draws as well as the volunteer's."""
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=100, batch=16, update="gradient")
    found = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    assert int(found["generator.norm0.num_batches_tracked"]) == 100
    assert int(found["discriminator.norm1.num_batches_tracked"]) == 200  # real and fakes apart
    moved = weights | {name: value for name, value in found.items() if "running" in name}
    plain = build(DcganConfig.from_dict(model), moved, "cpu")
    drawn = noise(0, 64)
    with torch.no_grad():
        in_batches, alone = plain.train().draw(drawn), plain.eval().draw(drawn)
    assert float(alone.std()) == pytest.approx(float(in_batches.std()), rel=0.1)


def test_a_step_is_the_classic_one(data: Folder) -> None:
    """Discriminator on real and fake, then the generator against the new discriminator, Adam for
    each.
    """
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    work = WORKLOAD.begin(job(model, steps=3, batch=32), weights, data, "cpu")
    found = finish(work)
    plain = build(DcganConfig.from_dict(model), weights, "cpu").train()
    adam_d = torch.optim.Adam(plain.discriminator.parameters(), 2e-4, (0.5, 0.999))
    adam_g = torch.optim.Adam(plain.generator.parameters(), 2e-4, (0.5, 0.999))
    both = 0.0
    for step in range(3):
        fakes = plain.draw(noise(step, 32))
        real = real_images(data, model, 32 * step, 32 * step + 32)
        loss_d = odds(plain.judge(real), True) + odds(plain.judge(fakes.detach()), False)
        adam_d.zero_grad()
        torch.autograd.backward(loss_d)
        adam_d.step()
        loss_g = odds(plain.judge(fakes), True)
        both = float(loss_d.detach() + loss_g.detach())
        adam_g.zero_grad()
        torch.autograd.backward(loss_g)
        adam_g.step()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-3, atol=1e-6)
    report = work.result()[0]
    assert report.loss_last == pytest.approx(both, rel=1e-4)
    assert set(report.metrics) >= {"loss_d", "loss_g", "real_known", "fakes_known"}


def test_it_says_where_it_stands(data: Folder) -> None:
    model = config(data)
    work = WORKLOAD.begin(job(model, steps=2), WORKLOAD.init(model, 0), data, "cpu")
    said = []
    while not work.done:
        progress = work.advance()
        said.append((progress.step, progress.samples, progress.loss is not None))
        assert bool(progress.metrics) == (progress.loss is not None)
    assert said == [(0, 4, False), (1, 8, True), (1, 12, False), (2, 16, True)]


def test_it_shows_some_of_what_the_generator_draws(data: Folder) -> None:
    model = config(data)
    work = WORKLOAD.begin(job(model), WORKLOAD.init(model, 0), data, "cpu")
    preview = work.advance().preview
    assert "\u2800" <= max(preview) <= "\u28ff"
    assert {len(line) for line in preview.splitlines()} == {54}


@pytest.mark.parametrize("batch", [1, 7, 24, 1000])
@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_any_batch_size_works_also_one_larger_than_the_unit(
    data: Folder, batch: int, update: str
) -> None:
    """F22."""
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=-(-24 // batch), batch=batch, stop=24, update=update)
    work = WORKLOAD.begin(task, weights, data, "cpu")
    found = finish(work)
    assert work.result()[0].samples == 24
    assert all(bool(torch.isfinite(value).all()) for value in found.values())


def test_the_same_task_gives_the_same_update(data: Folder) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    first = finish(WORKLOAD.begin(job(model), weights, data, "cpu"))
    torch.manual_seed(99)
    assert same(first, finish(WORKLOAD.begin(job(model), weights, data, "cpu")))
    assert not same(first, finish(WORKLOAD.begin(job(model, seed=12), weights, data, "cpu")))
    assert same(weights, WORKLOAD.init(model, 0))  # the base was not written to


@pytest.mark.parametrize("update", ["delta", "gradient"])
def test_a_restarted_task_ends_bit_for_bit_like_one_that_ran_through(
    data: Folder, update: str
) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    train = msgspec.structs.replace(ADAM, prox_mu=0.1)
    task = job(model, steps=4, update=update, train=train)
    whole = WORKLOAD.begin(task, weights, data, "cpu")
    expected = finish(whole)
    broken = WORKLOAD.begin(task, weights, data, "cpu")
    for _ in range(4):
        broken.advance()
    snapshot = broken.snapshot()
    broken.advance()
    with pytest.raises(RuntimeError, match="between steps"):
        broken.snapshot()
    again = WORKLOAD.begin(task, weights, data, "cpu")
    again.restore(snapshot)
    assert same(finish(again), expected)
    assert again.result()[0] == whole.result()[0]


def test_a_snapshot_of_another_task_is_refused(data: Folder) -> None:
    model, wider = config(data), config(data, generator_width=16)
    work = WORKLOAD.begin(job(model), WORKLOAD.init(model, 0), data, "cpu")
    other = WORKLOAD.begin(job(wider), WORKLOAD.init(wider, 0), data, "cpu")
    for snapshot in (work.snapshot(), {}):
        with pytest.raises(InvalidRunFile, match="another task"):
            other.restore(snapshot)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_pause_in_the_middle_of_a_step_changes_nothing(data: Folder, turn: int) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    results: list[Weights] = []
    for pause in (False, True):
        work = WORKLOAD.begin(job(model, batch=32), weights, data, "cpu")
        work.halve()
        for _ in range(1 + 2 * turn):
            work.advance()
        if pause:
            work.suspend()
            work.resume()
        results.append(finish(work))
    assert same(*results)


@pytest.mark.parametrize("advances", [1, 2, 3, 4, 5])
def test_a_pause_between_the_portions_of_a_batch_changes_nothing(
    data: Folder, monkeypatch: pytest.MonkeyPatch, advances: int
) -> None:
    """A pause drops the fakes that are kept for the generator; each is drawn again in its place."""
    monkeypatch.setattr("shared.workloads.dcgan.train._PORTION_FLOPS", 1.0)
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, batch=48)  # three portions, in two turns
    whole = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    work = WORKLOAD.begin(task, weights, data, "cpu")
    for _ in range(advances):
        work.advance()
    work.suspend()
    work.resume()
    assert same(finish(work), whole)


@pytest.mark.parametrize("advances", [0, 1, 4, 5])
def test_a_machine_short_of_memory_gives_the_same_bytes(data: Folder, advances: int) -> None:
    """Memory runs out before the task, or in the turn of either network, also after a restart."""
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=4, batch=32)
    whole = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    work = WORKLOAD.begin(task, weights, data, "cpu")
    for _ in range(advances):
        work.advance()
    assert work.halve() == 32
    if advances % 2 == 0:
        kept = work.snapshot()
        work = WORKLOAD.begin(task, weights, data, "cpu")
        work.restore(kept)
    assert same(finish(work), whole)


class Interrupted(torch.nn.Module):
    """A layer that runs out of memory once."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer, self.left = layer, 1

    @override
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(images)
        if self.left:
            self.left -= 1
            raise MemoryError("not enough")
        return out


@pytest.mark.parametrize("network", NETWORKS)
def test_memory_that_runs_out_within_a_pass_leaves_the_statistics_alone(
    data: Folder, network: str
) -> None:
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=2, batch=32)
    whole = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    work = WORKLOAD.begin(task, weights, data, "cpu")
    assert isinstance(work, DcganWork)
    last = getattr(work._model, network)[-1]
    getattr(work._model, network)[-1] = Interrupted(last)
    with pytest.raises(MemoryError):
        finish(work)
    getattr(work._model, network)[-1] = last
    work.halve()
    assert same(finish(work), whole)


def test_portions_are_never_halved_for_they_would_have_other_statistics(data: Folder) -> None:
    model = config(data)
    work = WORKLOAD.begin(job(model, batch=32), WORKLOAD.init(model, 0), data, "cpu")
    work.halve()
    with pytest.raises(MemoryError, match="32 images at once do not fit"):
        work.halve()


def test_a_loss_that_is_no_number_ends_the_task_with_advice(data: Folder) -> None:
    model = config(data)
    train = msgspec.structs.replace(ADAM, lr=1e30)
    work = WORKLOAD.begin(job(model, train=train), WORKLOAD.init(model, 0), data, "cpu")
    with pytest.raises(InvalidRunFile, match=r"no longer a number.*lower"):
        finish(work)


def test_bfloat16_keeps_float32_weights(data: Folder) -> None:
    model = config(data)
    train = msgspec.structs.replace(ADAM, precision="bfloat16")
    found = finish(WORKLOAD.begin(job(model, train=train), WORKLOAD.init(model, 0), data, "cpu"))
    assert {value.dtype for value in found.values()} == {torch.float32, torch.int64}


def test_a_slow_machine_cuts_a_batch_as_a_fast_one_does(
    data: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch norm learns another thing from other portions: a task done again would differ."""
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=4, batch=64)
    fast = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    hours = iter(range(0, 1 << 20, 3600))
    monkeypatch.setattr("shared.workloads.dcgan.train.perf_counter", lambda: float(next(hours)))
    slow = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    assert all(torch.equal(fast[name], slow[name]) for name in fast)


def test_portions_of_a_large_model_keep_their_statistics() -> None:
    small = DcganConfig(image_size=16, channels=1, generator_width=8, discriminator_width=8)
    assert portion(64, small) == 64
    large = DcganConfig(image_size=128, generator_width=256, discriminator_width=256)
    assert portion(64, large) == 16
    assert portion(8, large) == 8
