"""The inner optimiser, its learning rate, and the size of a micro-batch."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from shared.workloads.base import TrainSettings
from shared.workloads.training.lr_schedule import learning_rate, rewarm_factor, warmup
from shared.workloads.training.micro_batch import MicroBatchPace
from shared.workloads.training.optimizer import InnerOptimizer, balance_rows, muon, row_step
from tests.support.workloads.tiny_gpt import WORKLOAD, Folder, config, finish, job, same, sums


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return sums(tmp_path_factory.mktemp("blobs"))


def test_the_learning_rate_follows_global_steps() -> None:
    train = TrainSettings(lr=1.0, min_lr_ratio=0.1, warmup_steps=10)
    rates = [learning_rate(train, step, 110) for step in range(150)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[110:] == [pytest.approx(0.1)] * 40
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert learning_rate(train, 5000, 0) == 1.0  # nobody knows how long: level
    short = msgspec.structs.replace(train, decay_steps=60)
    assert learning_rate(short, 60, 110) == pytest.approx(0.1)


def test_a_run_that_says_nothing_warms_up_over_a_tenth_of_itself() -> None:
    train = TrainSettings(lr=1.0)
    assert [warmup(train, total) for total in (1_200, 50, 1_000_000, 0)] == [120, 20, 500, 100]
    assert learning_rate(train, 59, 1_200) == pytest.approx(0.5)
    assert max(learning_rate(train, step, 1_200) for step in range(1_200)) == 1.0
    assert warmup(TrainSettings(lr=1.0, warmup_steps=0), 1_200) == 0
    assert warmup(TrainSettings(lr=1.0, warmup_steps=7), 1_200) == 7


def test_the_rate_of_a_task_rises_over_its_first_steps() -> None:
    assert [rewarm_factor(step, 60) for step in (0, 2, 4, 5, 59)] == [0.2, 0.6, 1.0, 1.0, 1.0]
    assert [rewarm_factor(step, 12) for step in (0, 2, 3)] == [1 / 3, 1.0, 1.0]
    assert [rewarm_factor(0, steps) for steps in (1, 7, 8)] == [1.0, 1.0, 0.5]


def test_no_task_leaves_anything_to_the_next(data: Folder) -> None:
    """The optimiser is fresh: the same task after another task gives the same bytes."""
    model = config(data)
    weights = WORKLOAD.init(model, 0)
    task = job(model, steps=4, train=TrainSettings(lr=1e-2, warmup_steps=0))
    alone = finish(WORKLOAD.begin(task, weights, data, "cpu"))
    finish(WORKLOAD.begin(job(model, steps=3, seed=5), weights, data, "cpu"))
    assert same(finish(WORKLOAD.begin(task, weights, data, "cpu")), alone)


def test_only_matrices_decay() -> None:
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    train = TrainSettings(weight_decay=0.5)
    InnerOptimizer({"m": matrix, "v": vector}, train).step(0.1)
    assert matrix.detach().flatten().tolist() == pytest.approx([0.95] * 4)
    assert vector.tolist() == [1.0, 1.0]


def test_a_state_of_another_model_is_left_alone() -> None:
    value = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = InnerOptimizer({"m": value}, TrainSettings())
    assert not optimizer.load({})
    assert not optimizer.load(InnerOptimizer({"m": value}, TrainSettings(optimizer="sgd")).state())
    assert optimizer.load(optimizer.state())


def test_muon_turns_the_matrices_of_blocks_alone() -> None:
    torch.manual_seed(0)
    shapes = {"tok_emb.weight": (6, 4), "blocks.0.up.weight": (8, 4), "blocks.0.ln.weight": (4,)}
    values = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizer = InnerOptimizer(values, TrainSettings(optimizer="muon", weight_decay=0.0))
    for value in values.values():
        value.grad = torch.randn(value.shape) * torch.logspace(0, -3, value.shape[-1])
    optimizer.step(0.1)
    assert set(optimizer.state()) == {
        "row_squares/blocks.0.up.weight",
        *(f"momentum_buffer/{name}" for name in shapes),
        "steps",
    }
    turned = torch.linalg.svdvals(values["blocks.0.up.weight"].detach())
    assert float(turned.max() / turned.min()) < 5  # of the gradient hundreds
    # Elements move by a fifth of the rate in the mean, those of rows by three tenths: one rate does
    # for both.
    assert float(values["blocks.0.up.weight"].detach().square().mean().sqrt()) == pytest.approx(
        0.02, rel=0.3
    )
    rows = values["tok_emb.weight"].detach().square().mean(1).sqrt()
    assert rows.tolist() == pytest.approx([0.03] * 6, rel=0.01)


def test_the_rows_of_an_orthogonal_step_become_of_one_length() -> None:
    torch.manual_seed(0)
    change = torch.randn(8, 4) * torch.logspace(0, -2, 8)[:, None]
    squares = torch.zeros(8, 1)
    even = balance_rows(change, squares, weight=0.05)  # of the first step
    lengths = even.norm(dim=1)
    assert float(lengths.max() / lengths.min()) == pytest.approx(1.0, rel=1e-3)
    assert float(even.norm()) == pytest.approx(float(change.norm()), rel=1e-3)


def test_a_token_seen_once_does_not_move_for_the_rest_of_a_task() -> None:
    """The others are seen in each step."""
    grad, momentum = torch.ones(4, 2), torch.zeros(4, 2)
    first = row_step(grad, momentum)
    grad[3] = 0.0
    steps = [row_step(grad, momentum) for _ in range(99)]
    assert first.square().mean(1).sqrt().tolist() == pytest.approx([0.3] * 4)
    assert float(steps[-1][0].square().mean().sqrt()) == pytest.approx(0.3)
    assert float(steps[-1][3].abs().max()) < 0.01


def test_a_gradient_of_zeros_moves_nothing() -> None:
    assert not row_step(torch.zeros(3, 2), torch.zeros(3, 2)).any()
    assert not row_step(torch.zeros(3), torch.zeros(3)).any()
    (step,) = muon([torch.zeros(4, 2)], [torch.zeros(4, 2)], narrow=False)
    assert not balance_rows(step, torch.zeros(4, 1), 0.05).any()


def test_tasks_are_trained_without_importing_the_compiler(tmp_path: Path) -> None:
    """It takes a volunteer's first task a second of computing on a fast machine, and 70 MB."""
    code = """
import sys
from pathlib import Path
from shared.workloads.base import TrainSettings
from tests.support.workloads import tiny_gomoku, tiny_gpt
path = Path(sys.argv[1])
data = tiny_gpt.sums(path)
model = tiny_gpt.config(data)
for name in ("adamw", "muon", "sgd"):
    task = tiny_gpt.job(model, steps=1, train=TrainSettings(optimizer=name))
    weights = tiny_gpt.WORKLOAD.init(model, 0)
    tiny_gpt.finish(tiny_gpt.WORKLOAD.begin(task, weights, data, "cpu"))
boards = tiny_gomoku.config()
weights = tiny_gomoku.WORKLOAD.init(boards, 0)
tiny_gomoku.play(weights, 1, path)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.strip() == "False"


def test_a_micro_batch_answers_within_half_a_second() -> None:
    pace = MicroBatchPace(64, flops_per_sample=1e6, device="cpu")
    assert pace.micro == 64
    pace.record(64, 5.0)
    assert pace.micro == 64  # one hiccup
    pace.record(64, 6.4)
    assert pace.micro == 5
    for _ in range(20):
        pace.record(pace.micro, 0.001 * pace.micro)
    assert pace.micro == 64
    heavy = MicroBatchPace(64, flops_per_sample=1e13, device="cpu")
    assert (heavy.micro, MicroBatchPace(64, 1e13, "cuda:0").micro) == (1, 64)
    assert pace.halve() == 32
    for _ in range(20):
        pace.record(pace.micro, 0.001)
    assert pace.micro == 32  # memory did not fit more
