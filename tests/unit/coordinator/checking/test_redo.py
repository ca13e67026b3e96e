"""Blame where a task cannot be done again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from coordinator.checking import redo as module
from coordinator.checking.redo import RecomputeFiles, _alike, _written, redo, state_cosine
from coordinator.rules.checks import Redone
from coordinator.rules.likeness import judge
from shared.errors import BadRequest, Unavailable, VolunteerError
from shared.tensors.frame import FrameWriter, open_frame
from shared.tensors.quantize import codec, residual_schema
from shared.tensors.slices import ArrayReader
from shared.tensors.spec import TensorSpec
from shared.tensors.update import opened
from shared.workloads.base import Progress, Result

COUNT, TASKS = 4096, 6
SCHEMA = (TensorSpec("w", (COUNT,)),)
FILES = RecomputeFiles(
    weights=Path("w"), update=Path("u"), codec="int8", inner=None, left=None, residual=None
)


Row = NDArray[np.float32]


def handed_in(folder: Path, name: str, number: int, update: Row) -> RecomputeFiles:
    """The files of one of several tasks in a row, as a volunteer writes and keeps them."""
    before = folder / f"kept-{number - 1}"
    had: Any = open_frame(before, residual_schema(SCHEMA)) if before.exists() else {}
    file, kept = folder / f"update-{number}", folder / f"kept-{number}"
    codec(name).encode({"w": update}, SCHEMA, file, had, kept)
    return RecomputeFiles(
        weights=Path("w"), update=file, codec=name, inner=None, left=None, kept=kept,
        residual=before if before.exists() else None,
    )  # fmt: skip


def written(files: RecomputeFiles) -> Row:
    """Return the numbers that were sent."""
    with codec(files.codec).decode(files.update, SCHEMA) as update:
        return np.array(update["w"])


def beside(files: RecomputeFiles, ours: Row) -> Redone:
    chosen = codec(files.codec)
    with opened(files.update, SCHEMA, chosen, files.kept, files.residual) as (_, given):
        found = _alike(ArrayReader({"w": ours}, SCHEMA), given, SCHEMA)
    same = _written(files, chosen, SCHEMA)
    return Redone(cosine=found.cosine, norm_ratio=found.norm_ratio, written=same)


@pytest.mark.parametrize("name", ["int8", "int4", "topk-2bit"])
def test_half_of_the_work_is_told_apart_however_much_a_codec_leaves_behind(
    tmp_path: Path, name: str
) -> None:
    """Of 4,096 numbers topk-2bit sends 64, and which ones is a matter of rounding: as they were
    sent, honest work in bfloat16 and half of the work were nearly as far from the same task.
    """
    drawn = np.random.default_rng(1)
    common = drawn.standard_normal(COUNT)
    honest = np.zeros(COUNT, np.float32)
    for number in range(TASKS):
        honest = (common + drawn.standard_normal(COUNT)).astype(np.float32)
        found = beside(handed_in(tmp_path, name, number, honest), honest)
        assert judge(found, comparable=True) == "passed"
        assert min(found.cosine, found.written) > 0.9999
    half = (honest + 0.45 * drawn.standard_normal(COUNT)).astype(np.float32)
    lazy = handed_in(tmp_path, name, TASKS, half)
    found = beside(lazy, honest)
    assert 0.94 < found.cosine < 0.96
    assert judge(found, comparable=True) == "failed"


def test_what_is_left_behind_hides_nothing_that_was_sent(tmp_path: Path) -> None:
    """What was sent and what was kept add up to the honest update; what was sent differs."""
    drawn = np.random.default_rng(1)
    honest = drawn.standard_normal(COUNT).astype(np.float32)
    files = handed_in(tmp_path, "topk-2bit", 0, -honest)
    kept = honest - written(files)
    assert files.kept is not None
    with FrameWriter(files.kept, residual_schema(SCHEMA)) as writer:
        writer.write("w", kept)
        writer.close()
    found = beside(files, honest)
    assert found.cosine > 0.9999
    assert judge(found, comparable=True) == "failed"


@pytest.mark.parametrize("times", [10.0, 1.4, 0.5])
@pytest.mark.parametrize("name", ["int8", "topk-2bit"])
def test_what_was_sent_is_as_long_as_what_a_codec_makes_of_it(
    tmp_path: Path, name: str, times: float
) -> None:
    """Ten times what was found points where it should, and what is left behind makes up for it."""
    honest = np.random.default_rng(1).standard_normal(COUNT).astype(np.float32)
    own = written(handed_in(tmp_path, name, 0, honest))
    files = handed_in(tmp_path, name, TASKS, np.float32(times) * own)
    assert files.kept is not None
    with FrameWriter(files.kept, residual_schema(SCHEMA)) as writer:
        writer.write("w", honest - written(files))
        writer.close()
    found = beside(msgspec.structs.replace(files, residual=None), honest)
    assert found.cosine > 0.9999
    assert abs(found.norm_ratio - 1) < 1e-3
    assert judge(found, comparable=True) == "failed"


class Short:
    """Work that does not fit, in however small portions."""

    done = False

    def advance(self) -> Progress:
        raise MemoryError("not enough")

    def halve(self) -> int:
        raise MemoryError("not even one")


class Impossible(Short):
    """Work that cannot have been cut as its machine says."""

    def advance(self) -> Progress:
        raise BadRequest("no machine halves so often")


@pytest.mark.parametrize(("work", "error"), [(Short(), Unavailable), (Impossible(), BadRequest)])
def test_memory_that_is_short_here_is_not_held_against_the_worker(
    work: Short, error: type[VolunteerError], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = SimpleNamespace(begin=lambda *given: work)
    monkeypatch.setattr(module, "definition", lambda run: SimpleNamespace(workload=workload))
    monkeypatch.setattr(module, "read_weights", lambda path, about: {})
    case: Any = SimpleNamespace(run=None, job=None)
    with pytest.raises(error):
        redo(lambda: False, case, FILES, SimpleNamespace())  # type: ignore[arg-type]


class Descent:
    """One step from a base; a drifting one goes elsewhere from a base that is a little off."""

    done = False

    def __init__(self, base: torch.Tensor, *, drifting: bool) -> None:
        learnt = torch.linspace(-1.0, 1.0, COUNT)
        self._after = base - learnt - (0.3 * torch.cos(1e7 * base) if drifting else 0.0)

    def advance(self) -> Progress:
        self.done = True
        return Progress(step=1, steps=1, samples=1)

    def result(self) -> tuple[Result, dict[str, torch.Tensor]]:
        return Result(steps=1, samples=1, loss_first=1.0, loss_last=1.0), {"w": self._after}

    def state(self) -> dict[str, torch.Tensor]:
        return {}


@pytest.mark.parametrize(
    ("drifting", "device", "said"),
    [
        (False, "cpu", "failed"),
        (True, "cpu", "passed"),  # the task itself drifts as far as the update is off
        (False, "cuda", "passed"),  # within the loose bound; nothing is done a second time
    ],
)
def test_an_update_off_ours_is_judged_by_how_far_its_task_drifts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, drifting: bool, device: str, said: str
) -> None:
    base, begun = 1.0 + torch.rand(COUNT, generator=torch.Generator().manual_seed(1)), []

    def begin(job: object, given: dict[str, torch.Tensor], *_: object) -> Descent:
        begun.append(given["w"])
        return Descent(given["w"], drifting=drifting)

    about = SimpleNamespace(schema=SCHEMA, workload=SimpleNamespace(begin=begin))
    monkeypatch.setattr(module, "definition", lambda run: about)
    monkeypatch.setattr(module, "read_weights", lambda path, about: {"w": base.clone()})
    train = SimpleNamespace(precision="float32")
    job = SimpleNamespace(update="delta", halved=(), train=train)
    case: Any = SimpleNamespace(run=None, job=job, comparable=lambda on: device == on.kind)
    honest = (base - Descent(base, drifting=drifting).result()[1]["w"]).numpy()
    noise = np.random.default_rng(2).standard_normal(COUNT) * np.linalg.norm(honest) / COUNT**0.5

    def look(update: Row) -> Redone:
        begun.clear()
        files = handed_in(tmp_path, "float32", 0, update.astype(np.float32))
        return redo(lambda: False, case, msgspec.structs.replace(files, kept=None), case)

    found = look(honest)
    assert found.drift is None
    assert len(begun) == 1
    found = look(honest + 0.1 * noise)
    assert len(begun) == 1 + (device == "cpu")
    assert judge(found, comparable=device == "cpu") == said


def test_a_state_is_as_long_as_ours_and_of_numbers() -> None:
    ours = {"exp_avg/w": torch.linspace(-1.0, 1.0, 9), "steps": torch.tensor(3)}
    assert state_cosine(ours, ours) == pytest.approx(1.0)
    for times in (0.5, 2.0):
        other = ours | {"exp_avg/w": times * ours["exp_avg/w"]}
        assert state_cosine(ours, other) == pytest.approx(0.5)
    for wrong in (torch.full((9,), torch.nan), torch.full((9,), torch.inf), torch.zeros(8)):
        assert state_cosine(ours, ours | {"exp_avg/w": wrong}) == -1.0
    assert state_cosine(ours, ours | {"steps": torch.tensor(2)}) == -1.0
    assert state_cosine(ours, {}) == -1.0
