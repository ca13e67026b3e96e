"""Server optimisers: against torch's own, against the papers' formulas, delayed Nesterov's
identity, a golden trajectory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.aggregation.aggregate import aggregator, merge, prepare
from coordinator.aggregation.cohort import Floats, cohort, pieces
from coordinator.aggregation.server_optimizer import (
    BLOCK,
    Adaptive,
    DelayedNesterov,
    Momentum,
    Push,
    ServerOptimizer,
    Sgd,
    server_optimizer,
    state_schema,
)
from coordinator.plan.plan import plan
from coordinator.plan.presets import PRESETS
from shared.tensors.spec import Schema, TensorSpec
from tests.support.examples import examples
from tests.support.sources import ROOT

GOLDEN = ROOT / "tests" / "golden" / "merge_trajectory.json"
EVERY: dict[str, ServerOptimizer] = {
    "sgd": Sgd(0.5),
    "fedavgm": Momentum(0.7, 0.9, ahead=False),
    "nesterov": Momentum(0.7, 0.9, ahead=True),
    "delayed-nesterov": DelayedNesterov(0.7, 0.9, 3),
    "adam": Adaptive(1e-2, (0.9, 0.99), 1e-3, bias_correction=True, additive=False),
    "fedadam": Adaptive(1e-2, (0.9, 0.99), 1e-3, bias_correction=False, additive=False),
    "yogi": Adaptive(1e-2, (0.9, 0.99), 1e-3, bias_correction=False, additive=True),
}


class Server:
    """Weights, state and counters of a run with one flat tensor."""

    def __init__(self, optimizer: ServerOptimizer, start: Floats) -> None:
        self.optimizer = optimizer
        self.params = start.copy()
        self.state = {slot: np.zeros_like(start) for slot in optimizer.slots}
        self.counters: Mapping[str, float] = {}

    def push(self, update: Floats, push: Push | None = None) -> None:
        tick = self.optimizer.begin(self.counters, push or Push())
        self.optimizer.step(self.params, update, self.state, tick)
        # Counters are kept as float32 in a file, so they must survive that.
        self.counters = {name: float(np.float32(value)) for name, value in tick.counters.items()}


def noise(size: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


# ------------------------------------------------------------------ the same as torch, and as the papers

TORCH: dict[str, tuple[ServerOptimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (Sgd(0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "momentum": (
        Momentum(0.3, 0.9, ahead=False),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    ),
    "nesterov": (
        Momentum(0.7, 0.9, ahead=True),
        lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
    ),
    "adam": (
        Adaptive(0.01, (0.9, 0.999), 1e-8, bias_correction=True, additive=False),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.999), eps=1e-8),
    ),
}


@pytest.mark.parametrize("name", sorted(TORCH))
def test_thirty_steps_match_torch(name: str) -> None:
    ours, theirs = TORCH[name]
    server = Server(ours, noise(1000, 0))
    weights = torch.from_numpy(noise(1000, 0)).requires_grad_()
    optimizer = theirs([weights])
    for index in range(30):
        update = noise(1000, index + 1)
        server.push(update)
        weights.grad = torch.from_numpy(update.copy())
        optimizer.step()
    np.testing.assert_allclose(server.params, weights.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("additive", [False, True])
def test_fedadam_and_fedyogi_follow_the_paper(additive: bool) -> None:
    lr, b1, b2, tau = 0.05, 0.9, 0.99, 1e-3
    optimizer = Adaptive(lr, (b1, b2), tau, bias_correction=False, additive=additive)
    server = Server(optimizer, noise(500, 0))
    x, m, v = noise(500, 0).astype(np.float64), np.zeros(500), np.zeros(500)
    for index in range(20):
        update = noise(500, index + 1)
        server.push(update)
        fall = -update.astype(np.float64)  # the paper moves along mean(local) - global
        m = b1 * m + (1 - b1) * fall
        if additive:
            v = v - (1 - b2) * fall**2 * np.sign(v - fall**2)
        else:
            v = b2 * v + (1 - b2) * fall**2
        x = x + lr * m / (np.sqrt(v) + tau)
    np.testing.assert_allclose(server.params, x, rtol=1e-4, atol=1e-5)


def test_sgd_with_lr_1_on_deltas_is_the_average_of_the_local_weights() -> None:
    base, locals_ = noise(100, 0), [noise(100, seed) for seed in (1, 2, 3)]
    delta = np.mean([base - local for local in locals_], axis=0)
    server = Server(Sgd(1.0), base)
    server.push(delta)
    np.testing.assert_allclose(server.params, np.mean(locals_, axis=0), atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "fedavgm", "nesterov", "adam"])
def test_the_scale_of_a_push_shortens_the_step(name: str) -> None:
    whole, half = Server(EVERY[name], noise(50, 0)), Server(EVERY[name], noise(50, 0))
    whole.push(noise(50, 1))
    half.push(noise(50, 1), Push(scale=0.5))
    np.testing.assert_allclose(
        half.params - noise(50, 0), (whole.params - noise(50, 0)) / 2, atol=1e-6
    )


# ------------------------------------------------------------------ delayed Nesterov

WORK = st.floats(0.05, 2.0)


@given(st.lists(WORK, min_size=1, max_size=40), st.integers(1, 6), st.integers(0, 9))
def test_the_pushes_of_a_window_add_up_to_one_nesterov_step(
    works: list[float], window: int, seed: int
) -> None:
    """On their work-weighted mean, window after window, whatever the sizes of the pushes."""
    start = noise(64, seed)
    late, plain = Server(DelayedNesterov(0.7, 0.9, window), start), Server(EVERY["nesterov"], start)
    held: list[tuple[float, Floats]] = []
    for index, work in enumerate(works):
        update = noise(64, seed + 100 + index)
        held.append((work, update))
        late.push(update, Push(work=work))
        if late.counters["mass"] == 0:
            mean = np.average(
                [update for _, update in held], axis=0, weights=[work for work, _ in held]
            )
            plain.push(mean.astype(np.float32))
            np.testing.assert_allclose(late.params, plain.params, rtol=1e-4, atol=1e-4)
            np.testing.assert_array_equal(late.state["buffer"], 0)
            held = []
    if window <= sum(works) - 0.01:
        assert plain.params.tobytes() != start.tobytes()


def test_a_window_of_full_pushes_closes_after_exactly_so_many() -> None:
    server = Server(DelayedNesterov(0.7, 0.9, 4), noise(8, 0))
    masses = []
    for index in range(8):
        server.push(noise(8, index + 1))
        masses.append(server.counters["mass"])
    assert masses == [1, 2, 3, 0, 1, 2, 3, 0]


def test_a_window_closes_at_the_nearest_push() -> None:
    """Three workers push a whole and a slow one a fifth, all at once: such a merge is a round."""
    server = Server(DelayedNesterov(0.7, 0.9, 4), noise(8, 0))
    for index in range(3):
        server.push(noise(8, index + 1), Push(work=3.2))
        assert server.counters["mass"] == 0
    masses = []
    for index, work in enumerate((1, 1, 0.2, 1, 1, 1, 0.2, 1, 1)):
        server.push(noise(8, index + 9), Push(work=work))
        masses.append(round(server.counters["mass"], 3))
    assert masses == [1, 2, 2.2, 3.2, 0, 1, 1.2, 2.2, 3.2]


def test_a_window_keeps_the_number_of_workers_it_began_with() -> None:
    server = Server(DelayedNesterov(0.7, 0.9, 0), noise(8, 0))
    for workers in (3, 50, 1):
        server.push(noise(8, workers), Push(workers=workers))
    assert server.counters == {"mass": 0, "window": 0}
    server.push(noise(8, 9), Push(workers=2))
    assert server.counters == {"mass": 1, "window": 2}


def test_every_push_moves_the_weights_at_once() -> None:
    server = Server(DelayedNesterov(0.7, 0.9, 10), noise(8, 0))
    update = noise(8, 1)
    server.push(update, Push(work=0.5))
    expected = noise(8, 0) - np.float32(0.7 * 0.5 / 10) * update
    np.testing.assert_allclose(server.params, expected, rtol=1e-6)


def test_a_scaled_push_carries_its_share_into_the_momentum() -> None:
    """Windows of one push: the whole Nesterov step on an update of half the length."""
    late, plain = (
        Server(DelayedNesterov(0.7, 0.9, 1), noise(50, 0)),
        Server(EVERY["nesterov"], noise(50, 0)),
    )
    for index in range(3):
        late.push(noise(50, index + 1), Push(scale=0.5))
        plain.push(noise(50, index + 1) * np.float32(0.5))
    np.testing.assert_allclose(late.params, plain.params, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ pieces and state


@pytest.mark.parametrize("name", sorted(EVERY))
@settings(max_examples=examples(15))
@given(data=st.data())
def test_pieces_give_the_bytes_of_the_whole(name: str, data: st.DataObject) -> None:
    size = BLOCK * 2 + 77
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=4)))
    assume(len(set(cuts)) == len(cuts))
    whole, cut = Server(EVERY[name], noise(size, 0)), Server(EVERY[name], noise(size, 0))
    for index in range(4):
        update = noise(size, index + 1)
        whole.push(update)
        tick = cut.optimizer.begin(cut.counters, Push())
        for start, stop in zip([0, *cuts], [*cuts, size], strict=True):
            part = {slot: values[start:stop] for slot, values in cut.state.items()}
            cut.optimizer.step(cut.params[start:stop], update[start:stop], part, tick)
        cut.counters = tick.counters
    assert cut.params.tobytes() == whole.params.tobytes()


def test_state_lies_beside_the_parameters_only() -> None:
    schema: Schema = (
        TensorSpec("weight", (3, 4)),
        TensorSpec("running_mean", (4,), "F32", "buffer"),
        TensorSpec("steps", (1,), "I64", "counter"),
        TensorSpec("bias", (4,)),
    )
    assert state_schema(Sgd(1.0), schema) == ()
    found = {spec.name: spec.shape for spec in state_schema(EVERY["adam"], schema)}
    assert found == {
        "first/weight": (12,),
        "first/bias": (4,),
        "second/weight": (12,),
        "second/bias": (4,),
        "count/step": (1,),
    }


def test_the_update_is_left_as_it_was() -> None:
    for name, optimizer in EVERY.items():
        update = noise(100, 1)
        Server(optimizer, noise(100, 0)).push(update)
        np.testing.assert_array_equal(update, noise(100, 1), err_msg=name)


def test_every_preset_has_its_optimizer() -> None:
    found = {preset: server_optimizer(plan({"preset": preset})) for preset in PRESETS}
    assert found["fedavg"] == Sgd(1.0)
    assert found["fedavgm"] == Momentum(0.35, 0.8, ahead=False)
    assert found["diloco"] == Momentum(0.7, 0.8, ahead=True)
    assert found["async-diloco"] == DelayedNesterov(0.7, 0.8, 0)
    assert found["fedbuff"] == found["diloco"]
    assert found["fedyogi"] == Adaptive(
        0.003, (0.9, 0.99), 1e-3, bias_correction=False, additive=True
    )


# ------------------------------------------------------------------ golden trajectory

GOLDEN_SCHEMA: Schema = (TensorSpec("weight", (37, 11)), TensorSpec("bias", (13,)))
ROUNDS, WORKERS = 4, 7


class Exact:
    """A contribution made of exact fractions, the same on every machine and under every version of
    numpy.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def read(self, name: str, start: int, stop: int, room: Floats | None = None) -> Floats:
        place = np.arange(start, stop, dtype=np.uint64) + np.uint64(1000 * len(name) + self.seed)
        mixed = (place * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)  # 24 bits
        return (mixed.astype(np.float32) / np.float32(2**24) - np.float32(0.5)) / np.float32(8)


def trajectory(aggregate: str, optimizer: ServerOptimizer) -> list[str]:
    """SHA-256 of the weights after each round."""
    rule = aggregator(plan({"aggregate": aggregate, "quorum": WORKERS}), WORKERS)
    grid, found = pieces(GOLDEN_SCHEMA), []
    params = {spec.name: Exact(0).read(spec.name, 0, spec.count) for spec in GOLDEN_SCHEMA}
    state = {
        spec.name: np.zeros(spec.count, np.float32)
        for spec in state_schema(optimizer, GOLDEN_SCHEMA)
    }
    counters: Mapping[str, float] = {}
    for index in range(ROUNDS):
        readers = [Exact(17 * (index * WORKERS + worker + 1)) for worker in range(WORKERS)]
        group = cohort(readers, [1.0 + worker % 3 for worker in range(WORKERS)])
        tick = optimizer.begin(counters, Push(work=1.5, workers=2))
        counters = tick.counters
        for part in merge(rule, group, prepare(rule, group, grid), grid):
            name = part.piece.spec.name
            slots = {slot: state[f"{slot}/{name}"] for slot in optimizer.slots}
            optimizer.step(params[name], part.values, slots, tick)
        found.append(hashlib.sha256(b"".join(v.tobytes() for v in params.values())).hexdigest())
    return found


def test_merging_gives_the_golden_bytes() -> None:
    """The stored list of contributions always gives the same head.

    UPDATE_GOLDEN=1 writes the file anew.
    """
    found = {f"mean + {name}": trajectory("mean", optimizer) for name, optimizer in EVERY.items()}
    for rule in ("trimmed-mean", "median", "krum", "multi-krum", "centred-clip", "norm-clip"):
        found[f"{rule} + nesterov"] = trajectory(rule, EVERY["nesterov"])
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(GOLDEN.read_text(encoding="utf-8"))
