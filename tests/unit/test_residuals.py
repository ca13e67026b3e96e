"""What is carried over from one update to the next follows the verdicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.protocol import ContributionState, Verdict
from shared.tensors.frame import frame_bytes
from shared.tensors.spec import TensorSpec
from volunteer.residuals import Carried, Residuals

SCHEMA = (TensorSpec("w", (2,)),)
CPU = ("cpu",)


def encode(carried: Carried, task: int, value: float, global_step: int = 0) -> None:
    """As when the update of a task is written: its residual becomes the current one."""
    carried.next.write_bytes(frame_bytes({"w": np.full(2, value, np.float32)}))
    carried.advance(task, global_step)


def now(residuals: Residuals) -> float | None:
    found = residuals.of("r", "cpu").residual(SCHEMA)
    return float(found["w"][0]) if found else None


def verdict(task: int, state: ContributionState, reason: str = "") -> Verdict:
    return Verdict(contribution=task, task=task, run="r", state=state, reason=reason)


def two_updates(path: Path) -> Residuals:
    residuals = Residuals(path)
    carried = residuals.of("r", "cpu")
    encode(carried, 1, 0.1)
    encode(carried, 2, 0.2)
    return residuals


def test_the_first_update_carries_nothing(tmp_path: Path) -> None:
    assert now(Residuals(tmp_path)) is None


def test_an_accepted_update_keeps_its_residual(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.judged(verdict(2, "accepted"), CPU)
    residuals.judged(verdict(2, "merged"), CPU)
    assert now(residuals) == np.float32(0.2)
    assert not residuals.of("r", "cpu").previous.exists()


def test_rejected_content_zeroes_it(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.judged(verdict(1, "rejected", "norm"), CPU)
    assert now(residuals) is None


def test_an_update_that_never_counted_gives_the_one_before_back(tmp_path: Path) -> None:
    for reason in ("stale", "cancelled", "merge_failed"):
        residuals = two_updates(tmp_path / reason)
        residuals.judged(verdict(2, "rejected", reason), CPU)
        assert now(residuals) == np.float32(0.1)
    residuals = two_updates(tmp_path / "superseded")
    residuals.judged(verdict(2, "superseded"), CPU)
    assert now(residuals) == np.float32(0.1)
    residuals = two_updates(tmp_path / "gone")
    residuals.lost("r", 2, CPU)
    residuals.lost("r", 2, CPU)  # only once
    assert now(residuals) == np.float32(0.1)


def test_verdicts_on_older_updates_change_nothing(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.judged(verdict(1, "accepted"), CPU)
    residuals.judged(verdict(1, "rejected", "stale"), CPU)
    residuals.judged(verdict(2, "checking"), CPU)
    assert now(residuals) == np.float32(0.2)


def test_a_base_set_back_forgets_everything(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    residuals.of("r", "cpu").optimizer.write_bytes(b"moments")
    residuals.forget("r", CPU)
    assert now(residuals) is None
    assert not residuals.of("r", "cpu").optimizer.exists()


def test_a_base_set_back_while_nobody_was_here_is_noticed_at_the_next_task(tmp_path: Path) -> None:
    carried = Residuals(tmp_path).of("r", "cpu")
    encode(carried, 1, 0.1, global_step=500)
    carried.optimizer.write_bytes(b"moments")
    restarted = Residuals(tmp_path)
    restarted.of("r", "cpu").drop_if_behind(500)
    assert now(restarted) == np.float32(0.1)
    restarted.of("r", "cpu").drop_if_behind(450)
    assert now(restarted) is None
    assert not carried.optimizer.exists()


def test_a_residual_of_another_model_is_not_used(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    assert residuals.of("r", "cpu").residual((TensorSpec("w", (3,)),)) == {}


def test_runs_and_devices_do_not_share(tmp_path: Path) -> None:
    residuals = two_updates(tmp_path)
    assert residuals.of("r", "cuda:0").residual(SCHEMA) == {}
    assert residuals.of("r/../r", "cpu").current.parent == tmp_path
