"""Blame where a task cannot be done again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from typing_extensions import override

from coordinator.checking import recompute_comparison as module
from coordinator.checking.recompute_comparison import RecomputeFiles, redo
from coordinator.rules.draws import Redone
from coordinator.rules.recompute_result import judge
from shared.errors import Unavailable
from shared.tensors.codec import codec
from shared.tensors.spec import TensorSpec, momenta_of
from shared.workloads.base import Progress, Result

COUNT, TASKS = 4096, 6
SCHEMA = (TensorSpec("w", (COUNT,)),)
FILES = RecomputeFiles(weights=Path("w"), update=Path("u"), codec="int8")


Row = NDArray[np.float32]


def handed_in(folder: Path, name: str, update: Row, seed: int = 0) -> RecomputeFiles:
    """The file of a task's update, as a volunteer writes it."""
    file = folder / "update"
    codec(name).encode({"w": update}, SCHEMA, file, seed)
    return RecomputeFiles(weights=Path("w"), update=file, codec=name)


class Short:
    """Work that does not fit, in however small portions."""

    done = False

    def advance(self) -> Progress:
        raise MemoryError("not enough")

    def halve(self) -> int:
        raise MemoryError("not even one")


def test_memory_that_is_short_here_is_not_held_against_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = SimpleNamespace(begin=lambda *given: Short())
    monkeypatch.setattr(module, "definition", lambda run: SimpleNamespace(workload=workload))
    monkeypatch.setattr(module, "read_weights", lambda path, about: {})
    case: Any = SimpleNamespace(run=None, job=None)
    with pytest.raises(Unavailable):
        redo(lambda: False, case, FILES, SimpleNamespace())  # type: ignore[arg-type]


class Descent:
    """One step from a base; a drifting one goes elsewhere from a base that is a little off."""

    done = False

    def __init__(self, base: torch.Tensor, drift: float) -> None:
        learnt = torch.linspace(-1.0, 1.0, COUNT)
        self._after = base - learnt - drift * torch.cos(1e7 * base)

    def advance(self) -> Progress:
        self.done = True
        return Progress(step=1, steps=1, samples=1)

    def result(self) -> tuple[Result, dict[str, torch.Tensor]]:
        return Result(steps=1, samples=1, loss_first=1.0, loss_last=1.0), {"w": self._after}


@pytest.mark.parametrize(
    ("amount", "device", "said"),
    [
        (0.0, "cpu", "failed"),
        (0.05, "cpu", "passed"),  # the task itself drifts as far as the update is off
        (0.3, "cpu", "unproven"),  # it drifts too far to prove anything
        (0.0, "cuda", "passed"),  # within the loose bound; nothing is done a second time
    ],
)
def test_an_update_off_ours_is_judged_by_how_far_its_task_drifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amount: float, device: str, said: str
) -> None:
    base, begun = 1.0 + torch.rand(COUNT, generator=torch.Generator().manual_seed(1)), []

    def begin(job: object, given: dict[str, torch.Tensor], *_: object) -> Descent:
        begun.append(given["w"])
        return Descent(given["w"], amount)

    about = SimpleNamespace(schema=SCHEMA, workload=SimpleNamespace(begin=begin))
    monkeypatch.setattr(module, "definition", lambda run: about)
    monkeypatch.setattr(module, "read_weights", lambda path, about: {"w": base.clone()})
    train = SimpleNamespace(precision="float32")
    job = SimpleNamespace(update="delta", train=train, seed=3)
    case: Any = SimpleNamespace(run=None, job=job, comparable=lambda on: device == on.kind)
    honest = (base - Descent(base, amount).result()[1]["w"]).numpy()
    noise = np.random.default_rng(2).standard_normal(COUNT) * np.linalg.norm(honest) / COUNT**0.5

    def look(update: Row) -> Redone:
        begun.clear()
        files = handed_in(tmp_path, "float32", update.astype(np.float32), 3)
        return redo(lambda: False, case, files, case)

    found = look(honest)
    assert found.drift is None
    assert len(begun) == 1
    found = look(honest + 0.1 * noise)
    assert len(begun) == 1 + (device == "cpu")
    assert judge(found, comparable=device == "cpu") == said


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_a_forged_momentum_fails_beside_honest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    schema = (*SCHEMA, *momenta_of(SCHEMA))
    learnt = torch.linspace(-1.0, 1.0, COUNT)
    ends = {"w": -learnt, "momentum/w": 0.01 * learnt.flip(0).square()}

    class Work(Descent):
        @override
        def result(self) -> tuple[Result, dict[str, torch.Tensor]]:
            return super().result()[0], ends

    base = {spec.name: torch.zeros(spec.shape) for spec in schema}
    begin = SimpleNamespace(begin=lambda job, given, *_: Work(given["w"], 0.0))
    about = SimpleNamespace(schema=schema, workload=begin)
    monkeypatch.setattr(module, "definition", lambda run: about)
    monkeypatch.setattr(module, "read_weights", lambda path, about: dict(base))
    job = SimpleNamespace(update="delta", train=SimpleNamespace(precision="float32"), seed=3)
    case: Any = SimpleNamespace(run=None, job=job, comparable=lambda on: True)
    noise = torch.randn(COUNT, generator=torch.Generator().manual_seed(2))
    forged = ends["momentum/w"] + 0.1 * noise * ends["momentum/w"].norm() / COUNT**0.5

    def result(momentum: torch.Tensor) -> str:
        update = {"w": learnt.numpy(), "momentum/w": -momentum.numpy()}
        codec(name).encode(update, schema, tmp_path / "update", 3)
        files = RecomputeFiles(weights=Path("w"), update=tmp_path / "update", codec=name)
        redone = redo(lambda: False, case, files, case)
        return judge(redone, comparable=True)

    assert result(ends["momentum/w"]) == "passed"
    assert result(forged) == "failed"
    assert result(torch.zeros(COUNT)) == "failed"


@pytest.mark.parametrize(
    ("moved", "buffer", "counter", "verdict"),
    [
        (1.0, 0.0, 0, "passed"),
        (1.0, 0.5, 0, "failed"),
        (1.0, 0.0, 1, "failed"),
        (0.0, 0.0, 0, "passed"),  # the task leaves its buffers as they were
        (0.0, 0.5, 0, "failed"),
        (0.0, 0.0, 1, "failed"),
    ],
)
def test_forged_buffers_fail_beside_honest_weights(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moved: float,
    buffer: float,
    counter: int,
    verdict: str,
) -> None:
    schema = (
        *SCHEMA,
        TensorSpec("mean", (8,), role="buffer"),
        TensorSpec("steps", (), "I64", "counter"),
    )
    learnt = torch.linspace(-1.0, 1.0, COUNT)
    base = {"w": torch.zeros(COUNT), "mean": torch.ones(8), "steps": torch.tensor(3)}
    ends = {"w": -learnt, "mean": base["mean"] + moved, "steps": torch.tensor(4)}

    class Work(Descent):
        @override
        def result(self) -> tuple[Result, dict[str, torch.Tensor]]:
            return super().result()[0], ends

    begin = SimpleNamespace(begin=lambda job, given, *_: Work(given["w"], 0.0))
    about = SimpleNamespace(schema=schema, workload=begin)
    monkeypatch.setattr(module, "definition", lambda run: about)
    monkeypatch.setattr(module, "read_weights", lambda path, about: dict(base))
    job = SimpleNamespace(update="delta", train=SimpleNamespace(precision="float32"), seed=3)
    case: Any = SimpleNamespace(run=None, job=job, comparable=lambda on: True)
    update = {
        "w": learnt.numpy(),
        "mean": (ends["mean"] + buffer).numpy(),
        "steps": (ends["steps"] + counter).numpy(),
    }
    codec("int8").encode(update, schema, tmp_path / "update", 3)
    files = RecomputeFiles(weights=Path("w"), update=tmp_path / "update", codec="int8")
    assert judge(redo(lambda: False, case, files, case), comparable=True) == verdict


@pytest.mark.parametrize("name", ["float32", "bf16", "int8", "int4"])
def test_poison_of_a_tenth_fails_and_rounding_elsewhere_passes_whatever_the_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    base = 1.0 + torch.rand(COUNT, generator=torch.Generator().manual_seed(1))
    workload = SimpleNamespace(begin=lambda job, given, *_: Descent(given["w"], 0.0))
    about = SimpleNamespace(schema=SCHEMA, workload=workload)
    monkeypatch.setattr(module, "definition", lambda run: about)
    monkeypatch.setattr(module, "read_weights", lambda path, about: {"w": base.clone()})
    job = SimpleNamespace(update="delta", train=SimpleNamespace(precision="float32"), seed=3)
    case: Any = SimpleNamespace(run=None, job=job, comparable=lambda on: True)
    honest = (base - Descent(base, 0.0).result()[1]["w"]).numpy()
    noise = np.random.default_rng(2).standard_normal(COUNT) * np.linalg.norm(honest) / COUNT**0.5

    def result(update: NDArray[Any], seed: int = 3) -> str:
        files = handed_in(tmp_path, name, update.astype(np.float32), seed)
        return judge(redo(lambda: False, case, files, case), comparable=True)

    assert result(honest) == "passed"
    assert result(honest + 1e-3 * noise) == "passed"
    assert result(honest + 0.1 * noise) == "failed"
    assert result(0.9 * honest) == "failed"
    if name in ("int8", "int4"):
        assert result(honest, seed=4) == ("failed" if name == "int4" else "passed")
