"""Random numbers of torch that seeds fix, below the operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.errors import InvalidRunFile
from shared.workloads.derived.seeded_draws import (
    InitialDraws,
    SampleDraws,
    SeededDraws,
)

DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],  # a GPU's
    "randn_like": torch.randn_like,
    "rand": lambda x: torch.rand(x.shape),
    "randn": lambda x: torch.randn(len(x), 3),
    "randint": lambda x: torch.randint(2, 9, (len(x),)).float(),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "normal": lambda x: torch.normal(x, 2.0),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "random": lambda x: torch.empty_like(x).random_(0, 10),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "flattened": lambda x: F.dropout(x.flatten(0, 1), 0.3).view(x.shape),
}


def drawn(name: str, x: Tensor, first: int, step: int = 1) -> Tensor:
    with SeededDraws(SampleDraws(5, step, first, len(x))):
        return DRAWN[name](x)


@pytest.mark.parametrize("name", DRAWN)
def test_a_sample_has_its_numbers_in_any_micro_batch(name: str) -> None:
    x = torch.linspace(-1, 1, 8 * 6 * 4).view(8, 6, 4)
    whole = drawn(name, x, 0)
    parts = [drawn(name, x[start:stop], start) for start, stop in ((0, 3), (3, 8))]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-6)
    torch.manual_seed(1)
    assert torch.equal(whole, drawn(name, x, 0))
    assert not torch.equal(whole, drawn(name, x, 0, step=2))


def test_numbers_are_spread_as_they_should_be() -> None:
    x = torch.ones(50, 2000)
    with SeededDraws(SampleDraws(5, 1, 0, 50)):
        flat, bell, kept = torch.rand_like(x), torch.randn_like(x), F.dropout(x, 0.25)
    assert abs(float(flat.mean()) - 0.5) < 0.01
    assert 0 <= float(flat.min()) < 0.001 < 0.999 < float(flat.max()) < 1
    assert abs(float(bell.mean())) < 0.01
    assert abs(float(bell.std()) - 1) < 0.01
    assert abs(float((kept == 0).float().mean()) - 0.25) < 0.01
    assert sorted(set(kept.flatten().tolist())) == pytest.approx([0, 4 / 3])
    rows = torch.corrcoef(bell)
    assert float((rows - torch.eye(50)).abs().max()) < 0.15


def test_a_permutation_belongs_to_the_step() -> None:
    with SeededDraws(SampleDraws(5, 1, 0, 3)):
        order = torch.randperm(10)
    assert sorted(order.tolist()) == list(range(10))
    with SeededDraws(SampleDraws(5, 1, 3, 7)):
        assert torch.equal(torch.randperm(10), order)


def test_first_weights_have_the_distribution_of_their_layer() -> None:
    with SeededDraws(InitialDraws(1)):
        weight = torch.nn.Linear(100, 50).weight.detach()
        wide = torch.nn.init.trunc_normal_(torch.empty(100, 100), std=0.02)
        embedded = torch.nn.Embedding(1000, 8).weight.detach()
    assert float(weight.abs().max()) <= 0.1
    assert float(weight.std()) == pytest.approx(0.1 / 3**0.5, rel=0.05)
    assert float(wide.std()) == pytest.approx(0.02, rel=0.05)
    assert float(embedded.std()) == pytest.approx(1, rel=0.05)


def test_what_cannot_be_fixed_is_refused() -> None:
    with (
        SeededDraws(SampleDraws(5, 1, 0, 4)),
        pytest.raises(InvalidRunFile, match="aten::poisson draws random numbers that differ"),
    ):
        torch.poisson(torch.ones(4))
