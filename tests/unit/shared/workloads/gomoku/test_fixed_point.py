"""Fixed-point arithmetic of players: exact for any weights, the same bits on every processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.errors import InvalidRunFile
from shared.workloads.gomoku.config import GomokuConfig, GomokuOptions
from shared.workloads.gomoku.fixed_point import LEVELS, FixedConv
from shared.workloads.gomoku.network import NetEvaluator, build
from shared.workloads.gomoku.rules import Boards
from shared.workloads.gomoku.verification import Bench, Spot, examine, search_again
from tests.support.workloads.tiny_gomoku import config, lively, options, play

EXACT = 2**24  # integers that float32 tells apart


def scattered(cells: int, count: int) -> Boards:
    return np.random.default_rng(1).integers(-1, 2, (count, cells)).astype(np.int8)


def dead(**changes: int) -> dict[str, Tensor]:
    """Weights of a network whose first layer says nothing, and whose biases are large."""
    weights = lively(**changes)
    weights["stem.weight"] = torch.zeros_like(weights["stem.weight"])
    weights["stem.bias"] = torch.full_like(weights["stem.bias"], -1.0)
    return {n: w * 1e6 if n.endswith("bias") and "blocks" in n else w for n, w in weights.items()}


def outlying(**changes: int) -> dict[str, Tensor]:
    """Weights with a few that are a thousand times larger than the others."""
    weights = lively(**changes)
    for weight in weights.values():
        weight.view(-1)[:: max(1, weight.numel() // 3)] *= 1000
    return weights


@pytest.mark.parametrize("weights", [lively, dead, outlying])
@pytest.mark.parametrize(("blocks", "channels"), [(2, 16), (3, 40), (1, 152)])
def test_float32_arithmetic_gives_the_bits_of_bfloat16(
    weights: object, blocks: int, channels: int
) -> None:
    assert callable(weights)
    model = config(blocks=blocks, channels=channels)
    tensors = weights(blocks=blocks, channels=channels)
    boards = scattered(36, 40)
    here = NetEvaluator(GomokuConfig.from_dict(model), tensors, "cpu")(boards)
    other = NetEvaluator(GomokuConfig.from_dict(model), tensors, "cpu", native=False)(boards)
    assert np.array_equal(here[0], other[0])
    assert np.array_equal(here[1], other[1])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize(
    "name", ["stem.weight", "stem.bias", "blocks.0.one.weight", "policy.hidden.weight"]
)
def test_a_player_without_numbers_is_an_error_and_never_a_move(name: str, number: float) -> None:
    weights = lively(blocks=2, channels=16)
    weights[name].view(-1)[0] = number
    player = NetEvaluator(GomokuConfig.from_dict(config(blocks=2, channels=16)), weights, "cpu")
    with pytest.raises(InvalidRunFile, match="too large for a player, or no numbers"):
        player(scattered(36, 4))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("outlier", [1.0, 1e4])
@pytest.mark.parametrize("bias", [0.0, 1.0, 1e4])
def test_no_sum_of_a_layer_is_ever_rounded(size: float, outlier: float, bias: float) -> None:
    generator = torch.Generator().manual_seed(2)
    conv = nn.Conv2d(48, 48, 3, padding=1).requires_grad_(False)
    conv.weight.copy_(torch.randn(conv.weight.shape, generator=generator) * size)
    conv.weight[:, 0, 0, 0] *= outlier
    conv.bias = nn.Parameter(torch.randn(48, generator=generator) * bias, requires_grad=False)
    fixed = FixedConv(conv, 0.3, 0.7, torch.float32)
    weight, shift = fixed.weight / fixed.grain[:, None], fixed.bias / fixed.grain.flatten()
    assert torch.equal(weight, weight.round())
    assert torch.equal(shift, shift.round())
    assert float((weight.abs().sum((1, 2, 3)) * LEVELS + shift.abs()).max()) < EXACT
    largest = torch.full((1, 48, 6, 6), float(LEVELS)).bfloat16().float()
    anything = torch.randint(0, LEVELS + 1, (4, 48, 6, 6), generator=generator)
    for x in (largest, anything.bfloat16().float()):
        exact = F.conv2d(x.double(), fixed.weight.double(), fixed.bias.double(), padding=1)
        assert torch.equal(fixed(x), exact.float().bfloat16().float())


def test_a_player_judges_nearly_as_its_network_does() -> None:
    table = GomokuConfig.from_dict(config())
    boards = scattered(36, 200)
    logits, values = NetEvaluator(table, lively(), "cpu")(boards)
    with torch.inference_mode():
        expected = build(table, lively(), "cpu")(torch.from_numpy(boards))
    assert np.std(logits - expected[0].numpy()) < 0.03 * float(expected[0].std())
    assert np.std(values - expected[1].numpy()) < 0.03


def test_games_of_one_arithmetic_pass_the_check_in_another(tmp_path: Path) -> None:
    table = GomokuConfig.from_dict(config())
    manner = GomokuOptions.from_dict(options()).manner()
    records = play(lively(), 8, tmp_path)
    player = NetEvaluator(table, lively(), "cpu", native=False)
    bench = Bench(
        rules=table.rules, manner=manner, hashes={0: "00"}, player=lambda _: player, seed=1
    )
    assert examine(records, bench) == {}
    spots = [
        Spot(record=record, ply=ply, player=0)
        for record in records
        for ply in range(record.opening, len(record.moves))
    ]
    here = search_again(spots, bench, NetEvaluator(table, lively(), "cpu"))
    assert np.array_equal(here, search_again(spots, bench, player))
