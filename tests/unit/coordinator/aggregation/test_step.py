"""One merge, from files to files, against plain numpy."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.merge_step import (
    Input,
    MergeOrder,
    MergeOutput,
    merge_model,
)
from coordinator.aggregation.server_optimizer import Push
from coordinator.plan.plan import plan
from coordinator.plan.plan_tables import Plan
from shared.errors import InvalidFrame
from shared.tensors.codec import Codec, codec
from shared.tensors.frame import FrameWriter, WrittenFile, open_frame, schema_of_file
from shared.tensors.spec import TensorSpec, momenta_of

SCHEMA = (
    TensorSpec("embed", (40, 8), "F32"),
    TensorSpec("mean", (8,), "F32", "buffer"),
    TensorSpec("seen", (1,), "I64", "counter"),
    TensorSpec("head", (17,), "F32"),
    *momenta_of((TensorSpec("embed", (40, 8)),)),
)


def model(seed: int, counter: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    tensors = {
        spec.name: random.normal(size=spec.shape).astype(np.float32)
        for spec in SCHEMA
        if spec.role != "counter"
    }
    return tensors | {"seen": np.array([counter], np.int64)}


def write_model(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    with FrameWriter(path, SCHEMA, {}) as writer:
        for spec in SCHEMA:
            writer.write(spec.name, tensors[spec.name])
    return path


def contribution(path: Path, seed: int, counter: int = 3) -> dict[str, np.ndarray]:
    tensors = model(seed, counter)
    codec("float32").encode(tensors, SCHEMA, path)
    return tensors


def merge(
    folder: Path,
    chosen: Plan,
    weights: list[float],
    *,
    threads: int = 1,
    state: Path | None = None,
    **extra: object,
) -> tuple[MergeOutput, dict[str, np.ndarray]]:
    inputs = tuple(
        Input(path=folder / f"update-{index}", codec="float32", weight=weight)
        for index, weight in enumerate(weights)
    )
    order = MergeOrder(
        plan=chosen,
        schema=SCHEMA,
        base=folder / "base",
        state=(state,) if state else (),
        inputs=inputs,
        threads=threads,
        push=Push(),
        **extra,  # type: ignore[arg-type]
    )
    out = folder / f"out-{threads}-{state is not None}"
    outcome = merge_model(order, out, folder / f"{out.name}-state")
    with open_frame(out, SCHEMA) as frame:
        return outcome, {name: frame.array(name).copy() for name in frame}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "base", model(0))
    for index in range(3):
        contribution(tmp_path / f"update-{index}", 10 + index, counter=5 + index)
    return tmp_path


def test_averaging_subtracts_the_weighted_mean_and_carries_buffers_and_counters(
    folder: Path,
) -> None:
    weights = [10.0, 30.0, 60.0]
    outcome, merged = merge(folder, plan({"preset": "fedavg"}), weights)
    updates = [model(10 + index) for index in range(3)]
    for name in ("embed", "head", "momentum/embed"):
        mean = sum(
            w / 100 * u[name].astype(np.float64) for w, u in zip(weights, updates, strict=True)
        )
        np.testing.assert_allclose(merged[name], model(0)[name] - mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(merged["mean"], np.median([u["mean"] for u in updates], axis=0))
    assert merged["seen"].tolist() == [6]
    assert outcome.state is None
    assert outcome.update_norm > 0


def test_a_robust_rule_merges_momenta_by_the_median(folder: Path) -> None:
    chosen = plan({"preset": "fedavg", "aggregate": "norm-clip", "quorum": 5})
    _, merged = merge(folder, chosen, [1.0, 1.0, 1.0])
    name = "momentum/embed"
    middle = np.median([model(10 + index)[name] for index in range(3)], axis=0)
    np.testing.assert_allclose(merged[name], model(0)[name] - middle, rtol=1e-5, atol=1e-6)


def test_nesterov_keeps_its_momentum_from_merge_to_merge(folder: Path) -> None:
    chosen = plan({"preset": "diloco", "lr": 0.7, "momentum": 0.9})
    first, once = merge(folder, chosen, [1.0, 1.0, 1.0])
    assert first.state is not None
    state = folder / "out-1-False-state"
    assert [spec.name for spec in schema_of_file(state)] == ["momentum/embed", "momentum/head"]
    assert first.state == WrittenFile(
        sha256=hashlib.sha256(state.read_bytes()).hexdigest(), size=state.stat().st_size
    )
    (folder / "base").unlink()
    write_model(folder / "base", once)
    _, twice = merge(folder, chosen, [1.0, 1.0, 1.0], state=state)
    mean = {
        name: np.mean([model(10 + i)[name] for i in range(3)], axis=0) for name in ("embed", "head")
    }
    for name in mean:
        m1 = mean[name]
        m2 = 0.9 * m1 + mean[name]
        expected = model(0)[name] - 0.7 * (mean[name] + 0.9 * m1) - 0.7 * (mean[name] + 0.9 * m2)
        np.testing.assert_allclose(twice[name], expected, rtol=1e-4, atol=1e-5)
    name = "momentum/embed"  # the mean of what tasks ended with, whatever moves the weights
    change = np.mean([model(10 + i)[name] for i in range(3)], axis=0)
    np.testing.assert_allclose(twice[name], model(0)[name] - 2 * change, rtol=1e-4, atol=1e-5)


def test_the_bytes_do_not_depend_on_the_number_of_threads(folder: Path) -> None:
    one, _ = merge(folder, plan({"preset": "fedavg"}), [1.0, 2.0, 3.0], threads=1)
    two, _ = merge(folder, plan({"preset": "fedavg"}), [1.0, 2.0, 3.0], threads=3)
    assert one.weights.sha256 == two.weights.sha256


def test_each_update_is_opened_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counted(name: str) -> Codec:
        opened.append(name)
        return codec(name)

    monkeypatch.setattr("coordinator.aggregation.merge_step.codec", counted)
    merge(folder, plan({"aggregate": "norm-clip"}), [1.0, 1.0, 1.0])
    assert len(opened) == 3


def test_a_poisoned_contribution_fails_the_merge_and_leaves_no_file(folder: Path) -> None:
    poisoned = model(11)
    poisoned["embed"][3, 3] = np.nan
    (folder / "update-1").unlink()
    wire = codec("float32").wire_schema(SCHEMA)
    with FrameWriter(folder / "update-1", wire, {}) as writer:
        for spec in wire:
            writer.write(spec.name, poisoned[spec.name])
    with pytest.raises(InvalidFrame, match="1"):
        merge(folder, plan({"preset": "fedavg"}), [1.0, 1.0, 1.0])
    assert not [
        path
        for path in folder.iterdir()
        if path.name.endswith(".part") or path.name == "out-1-False"
    ]
